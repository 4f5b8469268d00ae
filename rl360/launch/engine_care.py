"""The supervisor's care for engines: ends those that are of no use, and strikes those that the recipe's faults name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from rl360.bus import events as ev
from rl360.bus.client import Bus
from rl360.child import Child
from rl360.config import Config
from rl360.launch import engine_faults, engine_watch
from rl360.launch.engine_faults import EngineFaults
from rl360.launch.engine_watch import EngineWatch, Process

ENGINE: Final = "engine"
_PERIOD: Final = 0.5  # seconds between two looks
_SIGNALS: Final = {"engine_kill": signal.SIGKILL, "engine_hang": signal.SIGSTOP}


class EngineCare:
    """Runs until it is cancelled. An engine that it ends is started again by its watcher, within its budget."""

    def __init__(self, bus: Bus, config: Config, children: Mapping[str, Child], say: Callable[[str], None]) -> None:
        self._bus, self._children, self._say = bus, children, say
        self._watch = EngineWatch(config.engine.start_seconds)
        names = [f"{ENGINE}{i}" for i in range(config.engine.count)]
        self._faults = EngineFaults(bus.run, config.faults, seed=config.run.seed, engines=names)

    async def run(self) -> None:
        types = engine_watch.FOLDED + (engine_faults.FOLDED if self._faults.pending else ())
        async with self._bus.reader(types=types) as reader:
            while True:
                record = await reader.next(_PERIOD)
                if record is not None:
                    self._watch.on(record.event, record.time)
                    self._faults.on(record.event)
                if reader.caught_up:
                    await self._act()

    async def _act(self) -> None:
        running = {n: Process(c.pid, c.started) for n, c in self._children.items() if n.startswith(ENGINE) and c.pid}
        for worker, why in self._watch.useless(time.time(), running).items():
            self._say(f"{worker}: {why}: it is killed")
            await self._children[worker].kill()
        for fault in self._faults.due():
            await self._strike(fault)

    async def _strike(self, fault: ev.FaultInjected) -> None:
        await self._bus.publish(fault)
        self._faults.on(fault)
        if pid := self._children[fault.target].pid:
            with suppress(ProcessLookupError):
                os.killpg(pid, _SIGNALS[fault.kind])
