"""Starts a run's processes, restarts those that die, ends all of them. Owns the run's deadline to stop.

Every restart is a line and a `WorkerRestarted` event. A worker that dies more often than `supervise.max_restarts`, and
whatever else the run can't go on with, ends it with an error that names the place.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import msgspec

from rl360.agents.sandbox.leases import sweep
from rl360.bus import events as ev
from rl360.bus import nats_server
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.bus.codec import Recorded
from rl360.bus.connection import BusError, JetStreamError
from rl360.child import Child
from rl360.config import Config
from rl360.engines import gateway
from rl360.launch import resume, storage
from rl360.launch.children import Children
from rl360.launch.engine_care import ENGINE, EngineCare
from rl360.launch.high_water import HighWater, Mark
from rl360.launch.kinds import workers_of
from rl360.launch.pulse import HangCare
from rl360.launch.rundir import RunDir, port_of
from rl360.launch.stored import StoreLock, take
from rl360.trainer import checkpoints

log = logging.getLogger(__name__)

NATS: Final = "nats-server"
GATEWAY: Final = "gateway"
_NATS_STOP: Final = 5.0
_LAST_WORD: Final = 5.0  # seconds to record how the run ended, and to let go of the bus


class RunFailed(Exception):
    """The run can't go on; the message says why and where to look."""


class Supervisor:
    """The processes of one run. `async with` starts them; leaving it ends them all."""

    def __init__(self, folder: RunDir, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self.config: Config = folder.config
        self._addresses, self._secrets = folder.addresses, folder.secrets
        self._seen = HighWater(folder.path / "nats" / "seen.json")
        self._store = StoreLock(folder)
        self._children = Children(folder, self._may_restart, self._restarted)
        self._beside: list[asyncio.Task[None]] = []
        self._hung: dict[str, str] = {}  # why a child was ended that hung, until it is recorded
        self._given_up: set[str] = set()  # engines that are not started again
        self._ended = False
        self._mute = False  # nothing can be recorded any more
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.resumed = 0
        self._stack = AsyncExitStack()
        self.blobs = BlobStore(folder.path / "blobs")

    # ------------------------------------------------------------------------------------------------ life

    async def __aenter__(self) -> Supervisor:
        if why := storage.shortage(self.folder.path, self.config.supervise.min_free_mb):
            raise RunFailed(f"{why}; {storage.remedy(self.folder.path)}")
        try:
            await self._start_nats()
            self.bus = await self._stack.enter_async_context(self._connect())
            await self.bus.create_streams()
            await self._open_journal()
            await self._start_gateway()
            for kind, index in workers_of(self.config):
                await self._children.start(f"{kind}{index}", self._worker_command(kind, index))
            self._run_beside(EngineCare(self.bus, self.config, self._children.by_name, self.say).run())
            self._run_beside(self._watch_storage())
            self._run_beside(self._hang_care().run())
        except BaseException as e:
            await self.kill()
            if isinstance(e, JetStreamError) and e.full:
                raise RunFailed(storage.journal_full(e, self.folder.path)) from None
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

    async def finish(self, why: str, steps: int) -> None:
        """Record how the run ended, where that can be recorded."""
        if self._mute:
            return
        event = ev.RunFinished(run=self.config.run.name, why=why, steps=steps, resumed=self.resumed)
        try:
            async with asyncio.timeout(_LAST_WORD):
                await self.bus.publish(event)
        except (BusError, TimeoutError) as e:
            log.error("the run's end could not be recorded: %s", e or "no receipt")

    async def stop(self) -> None:
        """Drain: no new attempts, then runners, then the rest, each within its bound; nats-server last."""
        if self._ended:
            return
        self._ended = True
        self._children.close()
        seconds = self.config.supervise.drain_seconds
        await self._children.stop(lambda n: n.startswith("scheduler"), seconds)
        await self._children.stop(lambda n: n.startswith("runner"), seconds)
        await self._sweep()
        await self._children.stop(lambda n: n != NATS, seconds)
        self._cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD):
                await self._stack.aclose()
        self._store.withdraw()
        await self._children.stop(lambda n: n == NATS, _NATS_STOP)
        self._store.release()
        self._children.forget()

    async def kill(self) -> None:
        """End every recorded child at once."""
        self._ended = True
        self._children.close()
        self._cancel()
        await self._children.kill(lambda _: True)
        self._store.release()
        await self._sweep()
        self._children.forget()

    def _cancel(self) -> None:
        self._children.cancel()
        for task in self._beside:
            task.cancel()

    async def _sweep(self) -> None:
        """Remove the sandboxes of runners that had to be killed: no runner is left that would (CASES 39)."""
        for name in await asyncio.to_thread(sweep, self.folder.path / "sandboxes"):
            log.warning("swept sandbox %s", name)

    def pids(self) -> dict[str, int]:
        """Recorded process ids of what runs now."""
        return self._children.pids()

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
        await self._children.start(NATS, nats_server.command(config))
        await nats_server.wait_healthy(self._addresses.nats_monitor_port)
        self._store.announce(self._address)

    async def _start_gateway(self) -> None:
        url = self._addresses.gateway
        command = gateway.command(
            "127.0.0.1", port_of(url), self._addresses.gateway_metrics_port, request_timeout=self.config.engine.request_timeout
        )
        await self._children.start(GATEWAY, command)

    @property
    def _address(self) -> BusAddress:
        return BusAddress(url=self._addresses.nats, user=nats_server.ADMIN, password=self._secrets.nats[nats_server.ADMIN])

    def _connect(self) -> Bus:
        return Bus.connect(self._address, self.config.run.name, self.blobs, name="supervisor")

    async def _open_journal(self) -> None:
        """See whether the journal is whole, and record the start."""
        mark = self._seen.read()
        rewound = await resume.look(self.bus, mark, self.folder.path / checkpoints.FOLDER)
        self.resumed = await resume.announce(self.bus, self.config)
        if rewound is not None:
            self.say(resume.told(rewound))
            await self.bus.publish(msgspec.structs.replace(rewound, resumed=self.resumed))
        elif mark is not None:
            self._seen.note(mark)
        self._run_beside(self._seen.keep())

    def _worker_command(self, kind: str, index: int) -> list[str]:
        return [sys.executable, "-m", "rl360", "worker", kind, "--dir", str(self.folder.path), "--index", str(index)]

    # ------------------------------------------------------------------------------------------------ restart, or stop

    async def _may_restart(self, child: Child, status: int) -> bool:
        """Whether a child that ended is started again; where the run can't go on without it, say why and stop."""
        budget = self.config.supervise.max_restarts
        if status == storage.EXIT_FULL:
            await self._stop_now(f"{child.name}: {storage.last_word(child.tail().splitlines())}")
        elif child.restarts > budget:
            await self._give_up(child, status)
        elif child.name == NATS and not await self._journal_is_whole():
            await self._stop_for_lost_events()
        else:
            self.say(f"{child.name} ended ({_how(status)}): restart {child.restarts} of {budget}")
            return True
        return False

    def _hang_care(self) -> HangCare:
        servers = {NATS: f"http://127.0.0.1:{self._addresses.nats_monitor_port}/healthz", GATEWAY: f"{self._addresses.gateway}/health"}
        return HangCare(self.folder.path, self._children.by_name, servers, self.config.supervise.hang_seconds, self._end_hung)

    def _end_hung(self, name: str, why: str) -> None:
        self._hung[name] = why
        self.say(f"{name}: {why}: it is killed")

    async def _restarted(self, child: Child, status: int) -> None:
        event = ev.WorkerRestarted(
            run=self.config.run.name,
            worker=child.name,
            restarts=child.restarts,
            exit_status=status,
            cause=self._hung.pop(child.name, _how(status)),
            resumed=self.resumed,
        )
        await self._record_event(event)

    async def _give_up(self, child: Child, status: int) -> None:
        """A worker's restarts are used up. Without an engine the run goes on while `engine.min_healthy` are left (CASES 32)."""
        why = f"{child.name} ended {child.restarts} times (status {status})"
        if not child.name.startswith(ENGINE):
            self._fail(f"{why}; the end of {child.log}:\n{child.tail()}")
            return
        self._given_up.add(child.name)
        left, needed = self.config.engine.count - len(self._given_up), self.config.engine.min_healthy
        if left < needed:
            self._fail(f"{why}; {left} engines are left, engine.min_healthy is {needed}; the end of {child.log}:\n{child.tail()}")
            return
        self.say(f"{why}: it is given up, {left} of {self.config.engine.count} engines are left (engine.min_healthy {needed})")
        run, resumed = self.config.run.name, self.resumed
        await self._record_event(ev.WorkerGivenUp(run=run, worker=child.name, exit_status=status, cause=_how(status), resumed=resumed))

    async def _journal_is_whole(self) -> bool:
        """While the server is down, and before a worker can reach it again."""
        mark = self._seen.newest
        return mark is None or await resume.store_holds(self.folder, mark)

    async def _stop_for_lost_events(self) -> None:
        """No worker may go on: each knows events that the journal lost. The bus comes back for the last word."""
        self._children.close()
        await self._children.kill(lambda n: n != NATS)
        await self._children.restart(NATS)
        self._fail(
            "the journal lost its end while nats-server was down (was its store replaced, or its disk?). "
            f"Every worker was ended; go on with what it holds: rl360 run --resume {self.folder.path}"
        )

    async def _watch_storage(self) -> None:
        path = self.folder.path
        why = await storage.watch(path, self.config.supervise.min_free_mb, self._addresses.nats_monitor_port)
        await self._stop_now(f"{why}; {storage.remedy(path)}")

    async def _stop_now(self, why: str) -> None:
        """Nothing more can be recorded: whatever is under way is ended, and done again when the run goes on."""
        self._mute = True
        self._children.close()
        self._fail(why)
        await self._children.kill(lambda n: n != NATS)

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something for as long as the run goes on; what ends it ends the run."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._over)
        self._beside.append(task)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            full = storage.out_of_space(error)
            self._fail(f"{full}; {storage.remedy(self.folder.path)}" if full else f"{type(error).__name__}: {error}")

    async def _record_event(self, event: ev.WorkerRestarted | ev.WorkerGivenUp) -> None:
        try:
            await self.bus.publish(event)
        except BusError as e:
            log.error("%s of %s could not be recorded: %s", type(event).__name__, event.worker, e)

    def _fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_result(why)


def _how(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
