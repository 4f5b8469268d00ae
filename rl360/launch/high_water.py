"""The newest event that a run is known to have recorded, kept beside its journal: it tells a journal that lost its end.

nats-server syncs its files once in `nats_server.SYNC_INTERVAL`, so a crash of the machine can take the last events with it,
while this file and the checkpoints, which are synced at once, are still there.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

import msgspec

_PERIOD: Final = 1.0  # seconds between two writes


class Mark(msgspec.Struct, frozen=True):
    """An event of the journal: its sequence, and when it was recorded (unix seconds)."""

    seq: int
    time: float


class HighWater:
    """The mark in `path`. `note` is called for every event that is seen; `keep` writes the newest one down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.newest: Mark | None = None
        self._written: Mark | None = None

    def read(self) -> Mark | None:
        """What an earlier start of the run wrote; None: nothing, or nothing that can be read (it is only a witness)."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Mark)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def note(self, mark: Mark) -> None:
        if self.newest is None or mark.seq > self.newest.seq:
            self.newest = mark

    async def keep(self) -> None:
        """Write the mark down once a period, until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD)
            if self.newest is not None and self.newest != self._written:
                await asyncio.to_thread(write, self._path, self.newest)
                self._written = self.newest


def write(path: Path, mark: Mark) -> None:
    """Replace the file; it is on the disk when this returns."""
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "wb") as f:
        f.write(msgspec.json.encode(mark))
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, path)
