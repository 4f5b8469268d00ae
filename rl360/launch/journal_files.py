"""The journal of a run's folder, after the run or during it. Who explains one step waits for it, so the client of the bus is loaded
while the server starts: each takes about as long as the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from rl360.bus import subjects
from rl360.bus.blobs import BlobStore
from rl360.bus.codec import Recorded
from rl360.config import ConfigError
from rl360.journal.archive import ArchiveSource, is_archive
from rl360.journal.source import Source
from rl360.launch.rundir import RunDir
from rl360.launch.stored import served

if TYPE_CHECKING:
    from rl360.bus.client import Bus


@asynccontextmanager
async def open_source(path: Path, journal: str = "") -> AsyncGenerator[Source]:
    """The journal of the run in `path`, or one that a step was copied into (`replay --into`).

    Raises ConfigError when there is no run, BusError or JournalError when it can't be read.
    """
    folder = RunDir(path.absolute())
    config = folder.config
    if is_archive(folder.path):
        if journal:
            raise ConfigError(f"{path} is an imported archive: it has one journal, of run {config.run.name}")
        yield ArchiveSource(folder.path)
        return
    Thread(target=import_module, args=("rl360.journal.stream",), daemon=True).start()
    async with served(folder) as address:
        from rl360.bus.client import Bus
        from rl360.journal.stream import StreamSource

        blobs = BlobStore(folder.path / "blobs")
        async with Bus.connect(address, journal or config.run.name, blobs, name="reader") as bus:
            await require(bus, path)
            yield StreamSource(bus, live=address.url == folder.addresses.nats)


async def require(bus: Bus, path: Path) -> None:
    """Raises ConfigError when the store of the run in `path` has no journal of the name that `bus` reads, and names those it has."""
    from rl360.bus.connection import api

    prefix = subjects.stream("")
    known = await api(bus.client, "STREAM.NAMES")
    names = [n.removeprefix(prefix) for n in known.get("streams") or () if n.startswith(prefix) and not n.endswith("_DLQ")]
    if bus.run not in names:
        held = f"it holds {', '.join(sorted(names))}" if names else "it holds none: the run was ended before it began"
        raise ConfigError(f"{path}: no journal is called {bus.run!r}; {held} (rl360 replay DIR --step N --into NAME makes a copy)")


async def records(path: Path, steps: Collection[int] | None = None, *, journal: str = "") -> list[Recorded]:
    """The whole journal of a run, or what `steps` need of it."""
    async with open_source(path, journal) as source:
        return await source.records(steps)
