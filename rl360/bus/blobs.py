"""Content-addressed bytes: `put` returns the digest, `get` verifies it. Files, written aside and renamed.

A blob that reads back with another digest is an error that names it; nobody trains on it.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import blake3
from typing_extensions import Buffer

from rl360.bus.payload import INLINE_LIMIT, Payload
from rl360.errors import InputError

_SHARD: Final = 2


class BlobError(InputError):
    """A blob is missing or is not what its digest says."""


class BlobMissing(BlobError):
    """A blob is not there."""


def digest_of(data: Buffer) -> str:
    """blake3 hex digest (64 characters)."""
    return blake3.blake3(data).hexdigest()


def is_full(error: OSError) -> bool:
    """A disk, or somebody's share of it, is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class BlobStore:
    """A folder of content-addressed files, safe for many writers at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.on_full: Callable[[OSError], None] | None = None  # called when the disk takes no more
        root.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        return self.root / digest[:_SHARD] / digest

    def put(self, data: Buffer) -> str:
        """Store `data` and return its digest. Storing the same bytes again writes nothing, and makes the blob new again.

        It is on the disk when this returns: an event that names it must not outlive it.
        """
        digest = digest_of(data)
        path = self.path(digest)
        try:
            os.utime(path)
            return digest
        except FileNotFoundError:
            pass
        path.parent.mkdir(exist_ok=True)
        aside = path.with_name(f"{digest}.{os.getpid()}.tmp")
        try:
            with open(aside, "wb", buffering=0) as f:
                view = memoryview(data).cast("B")
                while view:
                    view = view[f.write(view) :]
                os.fsync(f.fileno())
            os.replace(aside, path)
            _sync_folder(path.parent)
        except OSError as e:
            aside.unlink(missing_ok=True)
            if is_full(e) and self.on_full is not None:
                self.on_full(e)
            raise
        return digest

    def get(self, digest: str) -> bytes:
        """Read a blob. Raises BlobError when it is missing or damaged."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise BlobMissing(f"blob {digest} is missing from {self.root}") from None
        if digest_of(data) != digest:
            raise BlobError(f"blob {path} is damaged: its bytes have another digest; restore it from a copy of the run")
        return data

    def pack(self, data: Buffer) -> Payload:
        """Bytes as an event carries them: inline when small, else stored here and named by digest."""
        view = memoryview(data).cast("B")
        if len(view) <= INLINE_LIMIT:
            return Payload(size=len(view), inline=bytes(view))
        return Payload(size=len(view), digest=self.put(view))

    def unpack(self, payload: Payload) -> bytes:
        """The bytes of a payload, length checked (and digest, when they come from the store)."""
        data = self.get(payload.digest) if payload.inline is None else payload.inline
        if len(data) != payload.size:
            raise BlobError(f"payload {payload.digest or 'inline'}: {len(data)} bytes, {payload.size} were announced")
        return data

    def size(self, digest: str, *, before: float = math.inf) -> int | None:
        """Bytes of a blob; None: it is not there, or was stored (again) at `before` or later (unix seconds)."""
        try:
            stat = self.path(digest).stat()
        except FileNotFoundError:
            return None
        return stat.st_size if stat.st_mtime < before else None

    def remove(self, digest: str, *, before: float = math.inf) -> bool:
        """Remove a blob; False when there is none, or it was stored again at `before` or later, by whoever may name it next."""
        path = self.path(digest)
        aside = path.with_name(f"{digest}.{os.getpid()}.gone")
        try:
            os.rename(path, aside)  # from here on a writer finds none, and writes it again
        except FileNotFoundError:
            return False
        if aside.stat().st_mtime >= before:
            os.rename(aside, path)
            return False
        aside.unlink()
        return True
