"""Real servers for tests: one nats-server for the session, a run of its own for each test."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from rl360.bus import nats_server
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.ports import free_ports


class SideBySide(LoadScopeScheduling):
    """What runs at once (`make test`): files, whose tests share what is dear to make; whole runs one by one; all tests of the one Docker
    daemon together. By name, since xdist 3.8 can't mark the groups of pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/docker/"):
            return "tests/docker"
        return nodeid if nodeid.startswith("tests/launch/") else nodeid.partition("::")[0]


class NatsServer:
    """A nats-server of a test: can be killed and started again at the same port over the same store."""

    def __init__(self, root: Path, run: str = "test") -> None:
        self.port, self.monitor = free_ports(2)
        self.passwords = {name: secrets.token_hex(8) for name in (nats_server.ADMIN, *nats_server.PUBLISHES)}
        self.config = root / "nats.conf"
        self.log = root / "nats.log"
        text = nats_server.config_text(run=run, store=root / "store", port=self.port, monitor_port=self.monitor, passwords=self.passwords)
        nats_server.write_config(self.config, text)
        self.process: subprocess.Popen[bytes] | None = None

    def address(self, user: str = nats_server.ADMIN) -> BusAddress:
        return BusAddress(url=f"nats://127.0.0.1:{self.port}", user=user, password=self.passwords[user])

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(nats_server.command(self.config), stdout=log, stderr=log, start_new_session=True)
        asyncio.run(nats_server.wait_healthy(self.monitor))

    def kill(self) -> None:
        """kill -9, and wait until it is dead."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return SideBySide(config, log)


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test may kill."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def bus(nats: NatsServer, tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus with fresh streams of its own."""
    async with Bus.connect(nats.address(), f"t{secrets.token_hex(5)}", BlobStore(tmp_path / "blobs"), name="test") as bus:
        await bus.create_streams()
        yield bus
