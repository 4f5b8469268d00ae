"""The server of a run's store: the run's own while it goes on, else one started for as long as somebody reads.

Two servers over one store would ruin it. Whoever runs one holds `nats/server.lock` and writes there where it listens; who
finds the lock taken reads through that server, and holds `nats/readers.lock` so that a reader's server outlives it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from rl360.bus import nats_server
from rl360.bus.address import BusAddress, BusError
from rl360.child import Child
from rl360.config import ConfigError
from rl360.launch.rundir import RunDir
from rl360.ports import free_ports

_STOP: Final = 5.0  # seconds for a server to end
_OTHERS: Final = 60.0  # seconds that a server waits for readers it serves besides its own
_START: Final = 20.0  # seconds that a reader waits for the server of another to be up, or gone
_POLL: Final = 0.02


class StoreLock:
    """The right to run the server of one run's store. Released with its process, however that ends."""

    def __init__(self, folder: RunDir) -> None:
        self._path = folder.path / "nats" / "server.lock"
        self._fd = -1

    def take(self) -> bool:
        """False: somebody else has it."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        if not _lock(fd, fcntl.LOCK_EX):
            os.close(fd)
            return False
        os.ftruncate(fd, 0)
        self._fd = fd
        return True

    def announce(self, address: BusAddress) -> None:
        """The server is up."""
        os.pwrite(self._fd, msgspec.json.encode(address), 0)

    def withdraw(self) -> None:
        """The server is about to end."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def announced(self) -> BusAddress | None:
        """Where the holder's server listens; None: nowhere yet, or nobody holds the lock."""
        try:
            data = self._path.read_bytes()
            return msgspec.json.decode(data, type=BusAddress) if data else None
        except (FileNotFoundError, msgspec.MsgspecError):
            return None


@asynccontextmanager
async def served(folder: RunDir) -> AsyncGenerator[BusAddress]:
    """Where to read the store of `folder`. Raises ConfigError when there is none, BusError when no server comes up."""
    if not (folder.path / "nats" / "store").is_dir():
        raise ConfigError(f"{folder.path} has no journal (nats/store): this run was never started")
    lock, readers = StoreLock(folder), os.open(folder.path / "nats" / "readers.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        address = await _find(lock, readers, folder.path)
        if address is not None:
            yield address
        else:
            async with _server(folder, lock, readers) as own:
                yield own
    finally:
        lock.release()
        os.close(readers)


async def take(lock: StoreLock, path: Path) -> None:
    """Wait for the right to run the server. Raises BusError when it is not free in time."""
    try:
        async with asyncio.timeout(_START):
            while not lock.take():  # noqa: ASYNC110  (another process: nothing to wait on)
                await asyncio.sleep(_POLL)
    except TimeoutError:
        raise BusError(f"{path}: another process runs the server of this run's journal: let it end, then try again") from None


async def _find(lock: StoreLock, readers: int, path: Path) -> BusAddress | None:
    """The address of a server that stays until `readers` is closed, or None: the lock is ours."""
    try:
        async with asyncio.timeout(_START):
            while True:
                if lock.take():
                    return None
                if _lock(readers, fcntl.LOCK_SH) and (address := lock.announced()) is not None:
                    return address
                fcntl.flock(readers, fcntl.LOCK_UN)
                await asyncio.sleep(_POLL)
    except TimeoutError:
        raise BusError(f"{path}: another process holds this run's journal and its server is not up: let it end, then try again") from None


@asynccontextmanager
async def _server(folder: RunDir, lock: StoreLock, readers: int) -> AsyncGenerator[BusAddress]:
    """A server of our own, with a user and ports of its own: whatever runs where the run once listened is left alone."""
    port, monitor = free_ports(2)
    password = secrets.token_urlsafe(16)
    address = BusAddress(url=f"nats://127.0.0.1:{port}", user=nats_server.ADMIN, password=password)
    config, store = folder.path / "nats" / "reader.conf", folder.path / "nats" / "store"
    text = nats_server.config_text(
        run=folder.config.run.name, store=store, port=port, monitor_port=monitor, passwords={nats_server.ADMIN: password}
    )
    nats_server.write_config(config, text)
    server = Child("nats-server", nats_server.command(config), folder.path / "nats" / "reader.log")
    await server.start()
    try:
        await nats_server.wait_healthy(monitor)
        lock.announce(address)
        yield address
        await _others_gone(readers)
    finally:
        lock.withdraw()
        await server.stop(_STOP)


async def _others_gone(readers: int) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_OTHERS):
            while not _lock(readers, fcntl.LOCK_EX):  # noqa: ASYNC110  (another process: nothing to wait on)
                await asyncio.sleep(_POLL)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
