"""A run's events and what they need, written into one file."""

from __future__ import annotations

import io
import os
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Final

import msgspec

from rl360 import __version__
from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.blobs import BlobMissing, BlobStore
from rl360.bus.codec import DeadLetter, Message, record
from rl360.bus.payload import digests
from rl360.journal.manifest import MANIFEST, RECIPE, Manifest, Member, copy
from rl360.journal.pruned import Pruned
from rl360.journal.segments import SegmentWriter
from rl360.journal.source import JournalError, Source

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # of every member: the same journal gives the same file


async def write(source: Source, file: Path, *, recipe: bytes, steps: Collection[int] | None, folders: Mapping[str, Path]) -> Manifest:
    """Write what `steps` need (None: all), and whole folders under the names that they have in a run's. It is there when it is complete.

    Raises FileExistsError, BlobError when a blob is gone that was not pruned, JournalError when a step is not in the journal.
    """
    if file.exists():
        raise FileExistsError(f"{file} exists already: choose another name")
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(aside, "x", zipfile.ZIP_DEFLATED) as archive:
            manifest = await _Writer(archive).all(source, recipe, steps, folders)
        os.link(aside, file)  # unlike a rename, it never replaces
    finally:
        aside.unlink(missing_ok=True)
    return manifest


class _Writer:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members: dict[str, Member] = {}
        self._types: Counter[str] = Counter()
        self._opened: set[int] = set()
        self._needed: dict[str, set[int]] = {}  # digest -> steps
        self._pruned = Pruned()
        self._config_digest, self._last, self._messages = "", 0, 0

    async def all(self, source: Source, recipe: bytes, steps: Collection[int] | None, folders: Mapping[str, Path]) -> Manifest:
        self._put(RECIPE, recipe)
        letters = {letter.stream_seq: letter for letter in await source.dead_letters()}
        held: list[DeadLetter] = []
        writer = SegmentWriter(self._put)
        async for message in source.messages(steps):
            writer.add(message)
            self._see(message)
            if letter := letters.get(message.seq):
                held.append(letter)
        writer.finish()
        if missing := set(steps or ()) - self._opened:
            raise JournalError(f"run {source.run} has no step {', '.join(map(str, sorted(missing)))}: `rl360 journal ls` shows its steps")
        gone = sum(not self._blob(source.blobs, digest) for digest in sorted(self._needed))
        for name, folder in folders.items():
            self._folder(name, folder)
        cut = source.steps if steps is None else frozenset(steps)
        manifest = Manifest(
            run=source.run,
            code_version=__version__,
            config_digest=self._config_digest,
            steps=None if cut is None else tuple(sorted(cut)),
            last_seq=self._last,
            messages=self._messages,
            types=dict(sorted(self._types.items())),
            pruned=gone,
            dead_letters=tuple(held),
            segments=tuple(writer.segments),
            members=self._members,
        ).sealed()
        self._archive.writestr(_info(MANIFEST), msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        return manifest

    def _see(self, message: Message) -> None:
        name = subjects.parse(message.subject)
        self._types[name.type] += 1
        self._last, self._messages = message.seq, self._messages + 1
        for digest in digests(message.body):
            self._needed.setdefault(digest, set()).add(name.step)
        if name.type == "StepOpened":
            self._opened.add(name.step)
        elif name.type == "BlobsPruned":
            self._pruned.on(record(message))
        elif name.type == "RunStarted" and isinstance(started := record(message).event, ev.RunStarted):
            self._config_digest = started.config_digest

    def _blob(self, blobs: BlobStore, digest: str) -> bool:
        """False: it was pruned."""
        try:
            data = blobs.get(digest)
        except BlobMissing:
            if all(map(self._pruned.covers, self._needed[digest])):
                return False
            raise
        self._put(f"blobs/{digest[:2]}/{digest}", data)
        return True

    def _folder(self, name: str, folder: Path) -> None:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            with path.open("rb") as source:
                self._stream(f"{name}/{path.relative_to(folder)}", source)

    def _put(self, name: str, data: bytes) -> None:
        self._stream(name, io.BytesIO(data))

    def _stream(self, name: str, source: IO[bytes]) -> None:
        with self._archive.open(_info(name), "w", force_zip64=True) as target:
            self._members[name] = copy(source, target)


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info
