"""Worker kind `membership`: folds the journal, watches leases and processes, and keeps SMG's list equal to who is ready.

The list is compared, not replayed: after a restart of the gateway its empty list is filled again by the same comparison.
Engines stay registered while a push pauses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import nats.errors

from rl360.bus import events as ev
from rl360.bus.client import Bus
from rl360.bus.connection import BusError
from rl360.bus.worker import WorkerContext, react
from rl360.engines.client import EngineError
from rl360.engines.gateway import GatewayClient, corrections
from rl360.engines.membership import FOLDS, Member, Membership

PERIOD: Final = 0.5  # seconds between two looks at the leases and at the gateway's list
LEASE: Final = "engine."  # prefix of the lease keys of engine generations

_GATEWAY_TIMEOUT: Final = 5.0


class Seen(NamedTuple):
    """One look at who is alive."""

    leases: frozenset[str]
    dead: frozenset[str]


async def main(ctx: WorkerContext) -> None:
    """Run until `ctx.stop`. While bus or gateway are away it waits for them: nothing is lost or removed meanwhile."""
    machine = Membership(ctx.config.run.name, grace=ctx.config.engine.lease_seconds)
    async with aiohttp.ClientSession() as http:
        api = GatewayClient(http, ctx.addresses.gateway, timeout=_GATEWAY_TIMEOUT)
        watch = Watch(machine, ctx.bus, api, ctx.log)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(react(ctx.bus, machine, types=FOLDS, stop=ctx.stop, tick=PERIOD / 2, on_tick=watch.on_tick))
            tasks.create_task(watch.run(ctx.stop))


class Watch:
    """Looks at leases and processes for the machine, and makes the gateway agree with it."""

    def __init__(self, machine: Membership, bus: Bus, api: GatewayClient, log: logging.Logger) -> None:
        self._machine, self._bus, self._api, self._log = machine, bus, api, log
        self._seen: Seen | None = None
        self._caught_up = False  # with journal and leases; before that the machine knows too little to touch the gateway's list
        self._applied: set[str] = set()
        self._changed = asyncio.Event()
        self._troubles: set[str] = set()

    def on_tick(self, now: float) -> Sequence[ev.Event]:
        """Hand the newest look to the machine, once: it is the machine's clock that a missing look must not move."""
        seen, self._seen = self._seen, None
        decided: Sequence[ev.Event] = ()
        if seen is not None:
            self._caught_up = True
            decided = self._machine.on_tick(now, seen.leases, seen.dead)
        if set(self._machine.ready().values()) != self._applied:
            self._changed.set()
        return decided

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            with self._expected("leases", BusError, nats.errors.Error):
                self._seen = await self._look()
            if self._caught_up:
                with self._expected("gateway", EngineError):
                    await self._reconcile()
            await self._rest(stop)

    async def _rest(self, stop: asyncio.Event) -> None:
        """Until the next period, or until somebody became ready or was lost."""
        self._changed.clear()
        waits = {asyncio.create_task(self._changed.wait()), asyncio.create_task(stop.wait())}
        try:
            await asyncio.wait(waits, timeout=PERIOD, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _look(self) -> Seen:
        keys = await self._bus.leases.keys()
        leases = frozenset(k.removeprefix(LEASE) for k in keys if k.startswith(LEASE))
        return Seen(leases, frozenset(gone(self._machine.members.values(), node=socket.gethostname())))

    async def _reconcile(self) -> None:
        wanted = set(self._machine.ready().values())
        add, remove = corrections(wanted, await self._api.workers())
        for worker in remove:
            self._log.info("gateway: remove worker %s", worker)
            await self._api.remove(worker)
        for url in add:
            self._log.info("gateway: add %s", url)
            await self._api.add(url)
        self._applied = wanted

    @contextlib.contextmanager
    def _expected(self, what: str, *errors: type[Exception]) -> Generator[None]:
        """Bus and gateway may be away for a while: say so once, and once when it is over."""
        try:
            yield
        except errors as e:
            if what not in self._troubles:
                self._log.warning("%s: %s; trying again every %g s", what, e, PERIOD)
            self._troubles.add(what)
        else:
            if what in self._troubles:
                self._log.info("%s: back", what)
            self._troubles.discard(what)


def gone(members: Iterable[Member], *, node: str) -> Collection[str]:
    """Live generations on this node whose process doesn't run any more. Those of other nodes are judged by their lease alone."""
    return [m.generation for m in members if m.live and m.pid and m.node == node and not _runs(m.pid)]


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # a zombie awaits its parent: it serves nobody
