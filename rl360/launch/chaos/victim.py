"""One run of `rl360 chaos`: started, followed through its journal, struck, resumed, ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from rl360.bus import nats_server
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.bus.codec import Recorded
from rl360.bus.connection import BusError
from rl360.config import ConfigError
from rl360.dash.fold import RunView, Stage
from rl360.launch.chaos.plan import CRASH, WHOLE, Blow
from rl360.launch.rundir import RunDir

_SILENCE: Final = 120.0  # a run that records nothing for so many seconds stands still
_PATIENCE: Final = 12.0  # seconds after which a moment that has not come is taken to be now
_LEAST: Final = 0.5  # seconds between two blows
_LOST: Final = 1.0  # seconds of the journal that a crash of the machine takes
_END: Final = 20.0
_POLL: Final = 0.02
_OVER: Final = (Stage.INFRA, Stage.VERIFIED, Stage.DECIDED)


class Stuck(Exception):
    """The run stands still."""


class Victim:
    """`rl360 run` in `path`; what it prints goes to `path`.out."""

    def __init__(self, arguments: list[str], path: Path) -> None:
        self._arguments, self.path, self.folder = arguments, path, RunDir(path)
        self.output = path.with_name(path.name + ".out")
        self._process: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None
        self._view = RunView()
        self._seen: Counter[str] = Counter()  # events since the last blow, by type
        self._since = self._heard = time.time()

    async def start(self) -> None:
        await self._launch([*self._arguments, "--dir", str(self.path)])

    async def _launch(self, arguments: list[str]) -> None:
        with open(self.output, "ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rl360", "run", *arguments, "--plain", stdout=out, stderr=out, start_new_session=True
            )
        self._heard = time.time()
        self._following = asyncio.create_task(self._follow())

    @property
    def status(self) -> int | None:
        """Exit status of the run; None: it goes on."""
        return self._process.returncode if self._process else None

    # ------------------------------------------------------------------------------------------------ follow

    async def _follow(self) -> None:
        """Fold the journal of this life of the run; a bus that is away comes back."""
        while True:
            try:
                password = self.folder.secrets.nats[nats_server.ADMIN]
                address = BusAddress(url=self.folder.addresses.nats, user=nats_server.ADMIN, password=password)
                view = RunView()
                async with Bus.connect(address, self.folder.config.run.name, BlobStore(self.path / "blobs"), name="chaos") as bus:
                    async for record in bus.follow(stop=asyncio.Event()):
                        view.on(record)
                        self._note(view, record)
            except (BusError, ConfigError):
                await asyncio.sleep(_POLL)

    def _note(self, view: RunView, record: Recorded) -> None:
        self._view = view
        if record.time > self._since:
            self._seen[type(record.event).__name__] += 1
            self._heard = time.time()

    async def moment(self, blow: Blow | None) -> bool:
        """Wait for the moment of a blow (None: for the run's end); False: the run ended before. Raises Stuck."""
        patience = time.time() + _PATIENCE
        while self.status is None:
            if time.time() - self._heard > _SILENCE:
                raise Stuck(f"no event for {_SILENCE:g} s: {self.where}")
            if blow is not None and time.time() - self._since > _LEAST and (self._seen[blow.anchor] >= blow.nth or time.time() > patience):
                await asyncio.sleep(blow.delay)
                return self.status is None
            await asyncio.sleep(_POLL)
        return False

    @property
    def where(self) -> str:
        """How far the run is."""
        steps = [s for s in self._view.train_steps() if s.closed_at is None]
        if not steps:
            return "no step is open"
        parts = [f"step {s.step}: {sum(s.counts[x] for x in _OVER)}/{sum(g.attempts for g in s.opened.groups)} over" for s in steps[-2:]]
        return f"{', '.join(parts)}, version {max(self._view.version, 0)}"

    # ------------------------------------------------------------------------------------------------ strike

    async def strike(self, target: str) -> bool:
        """Kill; False when there is nothing to kill just now."""
        pids = self.folder.children
        if target in (WHOLE, CRASH):
            if not pids.get("nats-server"):
                return False
            await self._strike_all(crash=target == CRASH)
        elif not pids.get(target):
            return False
        else:
            with suppress(ProcessLookupError):
                os.kill(pids[target], signal.SIGKILL)
        self._seen.clear()
        self._since = time.time()
        return True

    async def _strike_all(self, *, crash: bool) -> None:
        store, copy = self.path / "nats" / "store", self.path.with_name(self.path.name + ".older")
        if crash:
            await asyncio.to_thread(copy_store, self.folder.children.get("nats-server", 0), store, copy)
            await asyncio.sleep(_LOST)
        await self._kill_all()
        if crash:
            shutil.rmtree(store)
            copy.rename(store)
        await self._launch(["--resume", str(self.path)])

    async def _kill_all(self) -> None:
        assert self._process is not None
        for pid in (self._process.pid, *self.folder.children.values()):
            _signal(pid, signal.SIGKILL)
        await self._process.wait()
        if self._following is not None:
            self._following.cancel()
        async with asyncio.timeout(_END):
            while self.folder.processes():  # noqa: ASYNC110  (other processes: nothing to wait on)
                await asyncio.sleep(_POLL)

    async def end(self) -> None:
        """See that nothing of it runs any more."""
        if self._process is not None and self.status is None:
            await self._kill_all()
        if self._following is not None:
            self._following.cancel()


def copy_store(server: int, store: Path, copy: Path) -> None:
    """The journal's files as they are at one moment: nats-server, process `server`, stands still meanwhile."""
    _signal(server, signal.SIGSTOP)
    try:
        shutil.copytree(store, copy)
    finally:
        _signal(server, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
