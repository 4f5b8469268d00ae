"""`rl360 run` as a user starts it, watched through its own journal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.bus.connection import BusError
from rl360.launch.rundir import RunDir

ROOT = Path(__file__).parents[2]
SMALL = (
    "tasks.groups_per_step=4",
    "tasks.attempts_per_group=4",
    "tasks.pool=8",
    "tasks.eval_pool=2",
    "tasks.eval_every=0",
    "runners.slots=8",
    "supervise.max_restarts=8",
    "supervise.drain_seconds=5.0",
)


class RunProcess:
    """One run under way."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self.process, self.path = process, path
        self.output = b""

    def pid_of(self, worker: str) -> int:
        return RunDir(self.path).children[worker]

    def kill(self, worker: str) -> None:
        """kill -9 of one recorded child."""
        os.kill(self.pid_of(worker), signal.SIGKILL)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    async def said(self, text: str, seconds: float = 20) -> None:
        """Wait for a line of its output that has `text`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(seconds):
            while (line := await self.process.stdout.readline()) and text not in line.decode():
                self.output += line
        assert line, self.output
        self.output += line

    async def ended(self, seconds: float) -> int:
        """Exit status; the output is kept."""
        async with asyncio.timeout(seconds):
            out, _ = await self.process.communicate()
        self.output += out or b""
        return self.process.returncode or 0

    @asynccontextmanager
    async def bus(self, seconds: float = 60) -> AsyncIterator[Bus]:
        """The run's journal, as soon as it can be read."""
        folder = RunDir(self.path)
        async with asyncio.timeout(seconds):
            while not (self.path / "children.json").exists():
                assert self.process.returncode is None, self.output
                await asyncio.sleep(0.05)
        address = BusAddress(url=folder.addresses.nats, user="admin", password=folder.secrets.nats["admin"])
        async with Bus.connect(address, folder.config.run.name, BlobStore(self.path / "blobs"), name="test") as bus:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        await bus.last_seq()
                        break
                    except BusError:  # the stream is being created
                        await asyncio.sleep(0.05)
            yield bus


@asynccontextmanager
async def running(path: Path, *arguments: str, overrides: tuple[str, ...] = SMALL) -> AsyncIterator[RunProcess]:
    """Start `rl360 run` in a process group of its own; whatever happens, nothing of it is left."""
    sets = [part for o in overrides for part in ("--set", o)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rl360",
        "run",
        *arguments,
        *sets,
        "--plain",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    run = RunProcess(process, path)
    try:
        yield run
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def leftovers(path: Path) -> list[str]:
    """Command lines of processes that still mention the run's folder."""
    return RunDir(path).processes()


async def nothing_left(path: Path, seconds: float = 20) -> None:
    """Wait until no process mentions the folder: sandboxes of a run that ended at once end when they find it gone."""
    async with asyncio.timeout(seconds):
        while leftovers(path):
            await asyncio.sleep(0.05)
