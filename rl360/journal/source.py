"""Where a run's events are read from. One way to ask; what answers is a server over the stream, or an archive (`archive`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rl360.bus.blobs import BlobStore
from rl360.bus.codec import DeadLetter, EventError, Message, Recorded, record
from rl360.errors import InputError


class JournalError(InputError):
    """The journal, or the archive of one, can't be used; the message names what is wrong with it and the remedy."""


@dataclass(frozen=True)
class Reading:
    """A journal that was read. What is no event of this version is kept apart by its sequence: its type, or what is wrong with it.

    `steps`: the steps that it was cut to; None: the whole journal.
    """

    records: Sequence[Recorded]
    unknown: Mapping[int, str] = field(default_factory=dict[int, str])
    malformed: Mapping[int, str] = field(default_factory=dict[int, str])
    dead_letters: Sequence[DeadLetter] = ()
    steps: frozenset[int] | None = None

    @property
    def unread(self) -> dict[int, str]:
        """All that was not read."""
        return {**self.unknown, **self.malformed}


class Source(ABC):
    """The journal of one run. `steps` are those that an archive was cut to; None: it is whole."""

    def __init__(self, run: str, blobs: BlobStore, steps: frozenset[int] | None = None) -> None:
        self.run, self.blobs, self.steps = run, blobs, steps

    @abstractmethod
    def messages(self, steps: Collection[int] | None = None) -> AsyncIterator[Message]:
        """In order: all, or those that `steps` need (`bus.selection`). Raises BusError or JournalError."""

    @abstractmethod
    async def dead_letters(self) -> list[DeadLetter]:
        """Work that was given up."""

    async def records(self, steps: Collection[int] | None = None) -> list[Recorded]:
        """All events, or those that `steps` need, in order."""
        return list((await self.read(steps)).records)

    async def read(self, steps: Collection[int] | None = None) -> Reading:
        """Events, what could not be read as one, and dead letters."""
        records: list[Recorded] = []
        unknown: dict[int, str] = {}
        malformed: dict[int, str] = {}
        async for message in self.messages(steps):
            try:
                records.append(record(message))
            except EventError as e:
                if e.unknown_type:
                    unknown[message.seq] = e.unknown_type
                else:
                    malformed[message.seq] = str(e)
        cut = self.steps if steps is None else frozenset(steps)
        return Reading(records, unknown, malformed, await self.dead_letters(), cut)
