"""Starts a run's processes, restarts those that die, ends all of them. Owns the run's deadline to stop.

Every restart is a line and a `WorkerRestarted` event. A worker that dies more often than `supervise.max_restarts`
ends the run with an error that names it and shows the end of its log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

import msgspec

from rl360 import __version__
from rl360.agents.sandbox.leases import sweep
from rl360.bus import events as ev
from rl360.bus import nats_server
from rl360.bus.blobs import BlobStore, digest_of
from rl360.bus.client import Bus, BusAddress
from rl360.bus.codec import Recorded
from rl360.bus.connection import BusError
from rl360.config import Config, to_toml_data
from rl360.engines import gateway
from rl360.launch import resume
from rl360.launch.child import Child
from rl360.launch.engine_care import ENGINE, EngineCare
from rl360.launch.high_water import HighWater, Mark
from rl360.launch.kinds import workers_of
from rl360.launch.rundir import RunDir, port_of
from rl360.launch.stored import StoreLock, take
from rl360.trainer import checkpoints

log = logging.getLogger(__name__)

NATS: Final = "nats-server"
GATEWAY: Final = "gateway"
_BACKOFF: Final = (0.0, 0.2, 0.5, 1.0, 2.0)  # seconds before the 1st, 2nd, … restart of a worker
_NATS_STOP: Final = 5.0


class RunFailed(Exception):
    """The run can't go on; the message says why and where to look."""


class Supervisor:
    """The processes of one run. `async with` starts them; leaving it ends them all."""

    def __init__(self, folder: RunDir, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self.config: Config = folder.config
        self._addresses, self._secrets = folder.addresses, folder.secrets
        self._seen = HighWater(folder.path / "nats" / "seen.json")
        self._children: dict[str, Child] = {}
        self._store = StoreLock(folder)
        self._watchers: list[asyncio.Task[None]] = []
        self._given_up: set[str] = set()  # engines that are not started again
        self._stopping = False  # no child is started again
        self._ended = False
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.resumed = 0
        self._stack = AsyncExitStack()
        self.blobs = BlobStore(folder.path / "blobs")

    # ------------------------------------------------------------------------------------------------ life

    async def __aenter__(self) -> Supervisor:
        try:
            await self._start_nats()
            self.bus = await self._stack.enter_async_context(self._connect())
            await self.bus.create_streams()
            await self._open_journal()
            await self._start_gateway()
            for kind, index in workers_of(self.config):
                await self._start(f"{kind}{index}", self._worker_command(kind, index))
            self._watchers.append(asyncio.create_task(self._care(), name="care for engines"))
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def seen(self, recorded: Recorded) -> None:
        """Whoever follows the journal tells what it saw, for the high-water mark."""
        self._seen.note(Mark(recorded.seq, recorded.time))

    async def failed(self) -> str:
        """Wait until the run can't go on; returns why."""
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Drain: no new attempts, then runners, then the rest, each within its bound; nats-server last."""
        if self._ended:
            return
        self._stopping = self._ended = True
        seconds = self.config.supervise.drain_seconds
        await self._end(lambda n: n.startswith("scheduler"), seconds)
        await self._end(lambda n: n.startswith("runner"), seconds)
        await self._sweep()
        await self._end(lambda n: n != NATS, seconds)
        for task in self._watchers:
            task.cancel()
        await self._stack.aclose()
        self._store.withdraw()
        await self._end(lambda n: n == NATS, _NATS_STOP)
        self._store.release()
        self._forget()

    async def kill(self) -> None:
        """End every recorded child at once."""
        self._stopping = self._ended = True
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*(c.kill() for c in self._children.values()))
        self._store.release()
        await self._sweep()
        self._forget()

    async def _sweep(self) -> None:
        """Remove the sandboxes of runners that had to be killed: no runner is left that would (CASES 39)."""
        for name in await asyncio.to_thread(sweep, self.folder.path / "sandboxes"):
            log.warning("swept sandbox %s", name)

    async def finish(self, why: str, steps: int) -> None:
        """Record how the run ended."""
        await self.bus.publish(ev.RunFinished(run=self.config.run.name, why=why, steps=steps, resumed=self.resumed))

    # ------------------------------------------------------------------------------------------------ start

    async def _start_nats(self) -> None:
        await take(self._store, self.folder.path)
        if self.folder.renew_addresses():
            self.say("somebody else listens on one of the run's ports: it has new ones")
            self._addresses = self.folder.addresses
        config = self.folder.path / "nats" / "server.conf"
        text = nats_server.config_text(
            run=self.config.run.name,
            store=self.folder.path / "nats" / "store",
            port=port_of(self._addresses.nats),
            monitor_port=self._addresses.nats_monitor_port,
            passwords=self._secrets.nats,
        )
        nats_server.write_config(config, text)
        await self._start(NATS, nats_server.command(config))
        await nats_server.wait_healthy(self._addresses.nats_monitor_port)
        self._store.announce(self._address)

    async def _start_gateway(self) -> None:
        url = self._addresses.gateway
        command = gateway.command(
            "127.0.0.1", port_of(url), self._addresses.gateway_metrics_port, request_timeout=self.config.engine.request_timeout
        )
        await self._start(GATEWAY, command)

    @property
    def _address(self) -> BusAddress:
        return BusAddress(url=self._addresses.nats, user=nats_server.ADMIN, password=self._secrets.nats[nats_server.ADMIN])

    def _connect(self) -> Bus:
        return Bus.connect(self._address, self.config.run.name, self.blobs, name="supervisor")

    async def _open_journal(self) -> None:
        """See whether the journal is whole, and record the start."""
        mark = self._seen.read()
        rewound = await resume.look(self.bus, mark, self.folder.path / checkpoints.FOLDER)
        self.resumed = await self._announce()
        if rewound is not None:
            self.say(resume.told(rewound))
            await self.bus.publish(msgspec.structs.replace(rewound, resumed=self.resumed))
        elif mark is not None:
            self._seen.note(mark)
        self._watchers.append(asyncio.create_task(self._seen.keep(), name="high-water mark"))

    async def _announce(self) -> int:
        """Publish RunStarted; returns how many times the run was started before."""
        data = to_toml_data(self.config)
        digest = digest_of(json.dumps(data, sort_keys=True).encode())
        before = len([r async for r in self.bus.replay(types=[ev.RunStarted])])
        await self.bus.publish(
            ev.RunStarted(
                run=self.config.run.name,
                config=data,
                config_digest=digest,
                code_version=__version__,
                seed=self.config.run.seed,
                resumed=before,
            )
        )
        return before

    def _worker_command(self, kind: str, index: int) -> list[str]:
        return [sys.executable, "-m", "rl360", "worker", kind, "--dir", str(self.folder.path), "--index", str(index)]

    async def _start(self, name: str, command: list[str]) -> None:
        child = Child(name, command, self.folder.path / "logs" / f"{name}.log", env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
        self._children[name] = child
        await child.start()
        self._record()
        self._watchers.append(asyncio.create_task(self._watch(child), name=f"watch {name}"))

    # ------------------------------------------------------------------------------------------------ watch

    async def _watch(self, child: Child) -> None:
        while True:
            status = await child.wait()
            if self._stopping:
                return
            child.restarts += 1
            if child.restarts > self.config.supervise.max_restarts:
                await self._give_up(child, status)
                return
            self.say(f"{child.name} ended ({_how(status)}): restart {child.restarts} of {self.config.supervise.max_restarts}")
            await child.kill()  # what is left of its group
            if child.name == NATS and not await self._journal_is_whole():
                await self._stop_for_lost_events(child)
                return
            await asyncio.sleep(_BACKOFF[min(child.restarts, len(_BACKOFF)) - 1])
            await child.start()
            self._record()
            await self._report(child, status)

    async def _journal_is_whole(self) -> bool:
        """While the server is down, and before a worker can reach it again."""
        mark = self._seen.newest
        return mark is None or await resume.store_holds(self.folder, mark)

    async def _stop_for_lost_events(self, nats: Child) -> None:
        """No worker may go on: each knows events that the journal lost. The bus comes back for the last word."""
        self._stopping = True
        await self._kill_workers()
        await nats.start()
        self._record()
        self._fail(
            "the journal lost its end while nats-server was down (was its store replaced, or its disk?). "
            f"Every worker was ended; go on with what it holds: rl360 run --resume {self.folder.path}"
        )

    async def _give_up(self, child: Child, status: int) -> None:
        """A worker's restarts are used up. Without an engine the run goes on while `engine.min_healthy` are left (CASES 32)."""
        why = f"{child.name} ended {child.restarts} times (status {status})"
        self._given_up.add(child.name)
        left = self.config.engine.count - len(self._given_up)
        needed = self.config.engine.min_healthy
        if child.name.startswith(ENGINE) and left >= needed:
            self.say(f"{why}: it is given up, {left} of {self.config.engine.count} engines are left (engine.min_healthy {needed})")
            run, resumed = self.config.run.name, self.resumed
            await self._record_event(ev.WorkerGivenUp(run=run, worker=child.name, exit_status=status, cause=_how(status), resumed=resumed))
            return
        few = f"; {left} engines are left, engine.min_healthy is {needed}" if child.name.startswith(ENGINE) else ""
        self._fail(f"{why}{few}; the end of {child.log}:\n{child.tail()}")

    async def _care(self) -> None:
        try:
            await EngineCare(self.bus, self.config, self._children, self.say).run()
        except BusError as e:
            self._fail(str(e))

    async def _report(self, child: Child, status: int) -> None:
        event = ev.WorkerRestarted(
            run=self.config.run.name,
            worker=child.name,
            restarts=child.restarts,
            exit_status=status,
            cause=_how(status),
            resumed=self.resumed,
        )
        await self._record_event(event)

    async def _record_event(self, event: ev.WorkerRestarted | ev.WorkerGivenUp) -> None:
        try:
            await self.bus.publish(event)
        except BusError as e:
            log.error("%s of %s could not be recorded: %s", type(event).__name__, event.worker, e)

    def _fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_result(why)

    # ------------------------------------------------------------------------------------------------ end

    async def _kill_workers(self) -> None:
        await asyncio.gather(*(c.kill() for c in self._children.values() if c.name != NATS))

    async def _end(self, which: Callable[[str], bool], seconds: float) -> None:
        chosen = [c for c in self._children.values() if which(c.name) and c.pid]
        await asyncio.gather(*(c.stop(seconds) for c in chosen))

    def pids(self) -> dict[str, int]:
        """Recorded process ids of what runs now."""
        return {name: c.pid for name, c in self._children.items() if c.pid}

    def _record(self) -> None:
        (self.folder.path / "children.json").write_text(json.dumps(self.pids(), indent=1))

    def _forget(self) -> None:
        (self.folder.path / "children.json").unlink(missing_ok=True)


def _how(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
