"""A journal read from the folder that an archive was laid down in: no server, the sequences and times of the original."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path

from rl360.bus import selection, subjects
from rl360.bus.blobs import BlobStore, digest_of
from rl360.bus.codec import DeadLetter, Message
from rl360.journal import manifest as told
from rl360.journal.manifest import MANIFEST, Manifest, Member, Segment
from rl360.journal.segments import decode, in_order
from rl360.journal.source import JournalError, Source


def is_archive(folder: Path) -> bool:
    """Whether an archive was laid down here."""
    return (folder / MANIFEST).exists()


class ArchiveSource(Source):
    """Read from a folder that an archive was laid down in. Raises JournalError when something in it was damaged since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.manifest = told.read((folder / MANIFEST).read_bytes(), str(folder))
        steps = self.manifest.steps
        super().__init__(self.manifest.run, BlobStore(folder / "blobs"), None if steps is None else frozenset(steps))

    async def messages(self, steps: Collection[int] | None = None) -> AsyncIterator[Message]:
        for message in self._messages(steps):
            yield message

    async def dead_letters(self) -> list[DeadLetter]:
        return list(self.manifest.dead_letters)

    def _messages(self, steps: Collection[int] | None) -> Iterator[Message]:
        if steps is None:
            yield from in_order(self.manifest.segments, self._segment)
            return
        if self.steps is not None and (missing := set(steps) - self.steps):
            held, asked = ", ".join(map(str, sorted(self.steps))), ", ".join(map(str, sorted(missing)))
            raise JournalError(f"{self._folder} was exported with step {held} alone, not {asked}: export that step as well")
        chosen = {p.step: p for p in selection.parts(steps)}
        for message in in_order([s for s in self.manifest.segments if s.step in chosen], self._segment):
            name = subjects.parse(message.subject)
            if chosen[name.step].has(name.type):
                yield message

    def _segment(self, segment: Segment) -> list[Message]:
        return read_segment(self._folder, segment, self.manifest, str(self._folder))


def read_segment(folder: Path, segment: Segment, manifest: Manifest, where: str) -> list[Message]:
    data = (folder / segment.name).read_bytes()
    told.check(segment.name, Member(len(data), digest_of(data)), manifest.members[segment.name], where)
    try:
        return decode(data, segment)
    except ValueError as e:
        raise JournalError(f"{where}: {e}") from None
