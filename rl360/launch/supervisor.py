"""Starts a run's processes, restarts those that die, ends all of them. Owns the run's deadline to stop.

Every restart is a line and a `WorkerRestarted` event. A worker that dies more often than `supervise.max_restarts`, and
whatever else the run can't go on with, ends it with an error that names the place.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Final

from rl360.agents.sandbox.leases import sweep
from rl360.bus import events as ev
from rl360.bus import nats_server
from rl360.bus.connection import BusError, JetStreamError
from rl360.child import Child
from rl360.launch import resume, servers, storage
from rl360.launch.children import Children
from rl360.launch.engine_care import ENGINE, EngineCare
from rl360.launch.kinds import workers_of
from rl360.launch.lead import Lead, RunFailed
from rl360.launch.pulse import HangCare
from rl360.launch.rundir import RunDir
from rl360.launch.stored import StoreLock, take

log = logging.getLogger(__name__)

NATS: Final = "nats-server"
GATEWAY: Final = "gateway"
_NATS_STOP: Final = 5.0


class Supervisor(Lead):
    """A lead that starts the run's processes. `async with` starts them; leaving it ends them all."""

    def __init__(self, folder: RunDir, say: Callable[[str], None]) -> None:
        super().__init__(folder, say)
        self._store = StoreLock(folder)
        self._children = Children(folder, self._may_restart, self._restarted)
        self._hung: dict[str, str] = {}  # why a child was ended that hung, until it is recorded
        self._given_up: set[str] = set()  # engines that are not started again
        self._ended = False

    # ------------------------------------------------------------------------------------------------ life

    async def __aenter__(self) -> Supervisor:
        self.refuse_full_disk()
        try:
            await self._start_nats()
            await self.open_bus()
            await self._children.start(GATEWAY, servers.gateway_command(self.folder))
            for kind, index in workers_of(self.config):
                await self._children.start(f"{kind}{index}", self._worker_command(kind, index))
            self.run_beside(EngineCare(self.bus, self.config, self._children.by_name, self.say).run())
            self.run_beside(self._watch_storage())
            self.run_beside(self._hang_care().run())
        except BaseException as e:
            await self.kill()
            if isinstance(e, JetStreamError) and e.full:
                raise RunFailed(storage.journal_full(e, self.folder.path)) from None
            raise
        return self

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
        self._children.cancel()
        await super().stop()
        self._store.withdraw()
        await self._children.stop(lambda n: n == NATS, _NATS_STOP)
        self._store.release()
        self._children.forget()

    async def kill(self) -> None:
        """End every recorded child at once."""
        self._ended = True
        self._children.close()
        self._children.cancel()
        self.cancel()
        await self._children.kill(lambda _: True)
        self._store.release()
        await self._sweep()
        self._children.forget()

    async def _sweep(self) -> None:
        """Remove the sandboxes of runners that had to be killed: no runner is left that would (CASES 39)."""
        try:
            for name in await asyncio.to_thread(sweep, self.folder.path / "sandboxes"):
                log.warning("swept sandbox %s", name)
        except OSError as e:
            log.error("sandboxes are left, and are removed when the run goes on (rl360 run --resume %s): %s", self.folder.path, e)

    def pids(self) -> dict[str, int]:
        """Recorded process ids of what runs now."""
        return self._children.pids()

    # ------------------------------------------------------------------------------------------------ start

    async def _start_nats(self) -> None:
        await take(self._store, self.folder.path)
        if self.folder.renew_addresses():
            self.say("somebody else listens on one of the run's ports: it has new ones")
            self.addresses = self.folder.addresses
        await self._children.start(NATS, nats_server.command(servers.nats_config(self.folder)))
        await nats_server.wait_healthy(self.addresses.nats_monitor_port)
        self._store.announce(self.address)

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
        servers = {NATS: f"http://127.0.0.1:{self.addresses.nats_monitor_port}/healthz", GATEWAY: f"{self.addresses.gateway}/health"}
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
            self.fail(f"{why}; the end of {child.log}:\n{child.tail()}")
            return
        self._given_up.add(child.name)
        left, needed = self.config.engine.count - len(self._given_up), self.config.engine.min_healthy
        if left < needed:
            self.fail(f"{why}; {left} engines are left, engine.min_healthy is {needed}; the end of {child.log}:\n{child.tail()}")
            return
        self.say(f"{why}: it is given up, {left} of {self.config.engine.count} engines are left (engine.min_healthy {needed})")
        run, resumed = self.config.run.name, self.resumed
        await self._record_event(ev.WorkerGivenUp(run=run, worker=child.name, exit_status=status, cause=_how(status), resumed=resumed))

    async def _journal_is_whole(self) -> bool:
        """While the server is down, and before a worker can reach it again."""
        mark = self.marks.newest
        return mark is None or await resume.store_holds(self.folder, mark)

    async def _stop_for_lost_events(self) -> None:
        """No worker may go on: each knows events that the journal lost. The bus comes back for the last word."""
        self._children.close()
        await self._children.kill(lambda n: n != NATS)
        await self._children.restart(NATS)
        self.fail(
            "the journal lost its end while nats-server was down (was its store replaced, or its disk?). "
            f"Every worker was ended; go on with what it holds: rl360 run --resume {self.folder.path}"
        )

    async def _watch_storage(self) -> None:
        path = self.folder.path
        why = await storage.watch(path, self.config.supervise.min_free_mb, self.addresses.nats_monitor_port)
        await self._stop_now(f"{why}; {storage.remedy(path)}")

    async def _stop_now(self, why: str) -> None:
        """Nothing more can be recorded: whatever is under way is ended, and done again when the run goes on."""
        self.mute = True
        self._children.close()
        self.fail(why)
        await self._children.kill(lambda n: n != NATS)

    async def _record_event(self, event: ev.WorkerRestarted | ev.WorkerGivenUp) -> None:
        try:
            await self.bus.publish(event)
        except BusError as e:
            log.error("%s of %s could not be recorded: %s", type(event).__name__, event.worker, e)


def _how(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
