"""`rl360 worker KIND`: one worker, in this process, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.bus.worker import WorkerContext
from rl360.launch import storage
from rl360.launch.journal_files import require
from rl360.launch.kinds import Main, load
from rl360.launch.pulse import FOLDER, beat
from rl360.launch.rundir import RunDir
from rl360.launch.stored import served

LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def run_worker(kind: str, index: int, path: Path, journal: str = "", host: str = "127.0.0.1") -> None:
    """Run a worker of the run in `path`, or on a step that was copied into `journal`; `host`: where other workers reach it.

    Raises MissingExtra, ConfigError or BusError when it can't start.
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    folder = RunDir(path)
    main = load(kind, folder.config)
    try:
        asyncio.run(_run(kind, index, folder, main, journal, host))
    except Exception as e:
        if why := storage.out_of_space(e):
            storage.stop_full(f"{why}; {storage.remedy(path)}")
        raise


async def _run(kind: str, index: int, folder: RunDir, main: Main, journal: str, host: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    path, config, addresses, secrets = folder.path, folder.config, folder.addresses, folder.secrets
    async with AsyncExitStack() as stack:
        address = BusAddress(url=addresses.nats, user=kind, password=secrets.nats[kind])
        if journal:
            address = await stack.enter_async_context(served(folder))
        blobs = BlobStore(folder.path / "blobs")
        blobs.on_full = lambda e: storage.stop_full(f"the blob store is full: {e.strerror}: {blobs.root}; {storage.remedy(path)}")
        connecting = Bus.connect(address, journal or config.run.name, blobs, name=f"{kind}{index}")
        connecting.on_full = lambda e: storage.stop_full(storage.journal_full(e, path))
        bus = await stack.enter_async_context(connecting)
        if journal:
            await require(bus, path)
        context = WorkerContext(
            kind=kind,
            index=index,
            config=config,
            dir=folder.path,
            bus=bus,
            addresses=addresses,
            secrets=secrets,
            stop=stop,
            log=logging.getLogger(f"rl360.{kind}{index}"),
            host=host,
        )
        context.log.info("started")
        if not journal:  # nobody waits for a worker on a copy
            pulse = asyncio.create_task(beat(folder.path / FOLDER / context.name))
            stack.callback(pulse.cancel)
        await main(context)
        context.log.info("stopped")
