"""A journal read through a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

from rl360.bus.client import Bus
from rl360.bus.codec import DeadLetter, Message
from rl360.bus.journal import dead_letters
from rl360.journal.source import Source


class StreamSource(Source):
    """The stream of a run that goes on (`live`), or that is over."""

    def __init__(self, bus: Bus, *, live: bool) -> None:
        super().__init__(bus.run, bus.blobs)
        self.bus, self.live = bus, live

    def messages(self, steps: Collection[int] | None = None) -> AsyncIterator[Message]:
        return self.bus.messages(steps)

    async def dead_letters(self) -> list[DeadLetter]:
        return await dead_letters(self.bus.client, self.run)
