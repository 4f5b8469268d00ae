"""A runner's door to its node: an attempt waits here until its sandbox may start (CASES 41). The shell around `waves.pick`.

Runs in one event loop. Whoever waits has a deadline, and the attempt's delivery beats meanwhile; a seat is given back once,
by `leave`, whatever happened.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rl360.agents.outcomes import InfraError
from rl360.agents.placement import Need, Node
from rl360.agents.waves import Start, pick
from rl360.bus.events import Boundary, Cause


class Seat:
    """What an admitted start holds of its node: a pull until it has started, a reservation until it leaves."""

    def __init__(self, door: Admission, start: Start) -> None:
        self._door, self._start = door, start
        self._starting = self._held = True

    def started(self, *, ok: bool) -> None:
        """The start ended. A second word on it says nothing new."""
        if self._starting:
            self._starting = False
            self._door.change(self._door.node.started(self._start.image, ok=ok))

    def leave(self) -> None:
        """The sandbox is gone."""
        self.started(ok=False)
        if self._held:
            self._held = False
            self._door.change(self._door.node.end(self._start.need))


@dataclass(frozen=True)
class _Waiting:
    start: Start
    seat: asyncio.Future[Seat]


class Admission:
    """Lets starts in, oldest first. `total` is what this runner may reserve of its node, `max_pulls` its share of the registry."""

    def __init__(self, total: Need, max_pulls: int) -> None:
        self.node = Node(total=total)
        self._max_pulls = max_pulls
        self._waiting: list[_Waiting] = []

    async def enter(self, start: Start, deadline: float) -> Seat:
        """Wait for a seat until `deadline` (unix seconds).

        Raises InfraError: queue/timeout, which says what was missing, or sandbox/bad_task for what could never fit.
        """
        if not self.node.could_fit(start.need):
            raise InfraError(Boundary.SANDBOX, Cause.BAD_TASK, _too_big(self.node.total, start.need), exception="NotAdmitted")
        waiting = _Waiting(start, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        asyncio.get_running_loop().call_later(max(0.0, start.due - time.time()), self._look)
        self._look()
        try:
            await asyncio.wait({waiting.seat}, timeout=max(0.0, deadline - time.time()))
        except asyncio.CancelledError:
            self._give_up(waiting)
            raise
        if waiting.seat.done():
            return waiting.seat.result()
        why = self._missing(waiting)
        self._give_up(waiting)
        raise InfraError(Boundary.QUEUE, Cause.TIMEOUT, why, exception="NotAdmitted")

    def change(self, node: Node) -> None:
        """The node is another now: see who may start."""
        self.node = node
        self._look()

    def _look(self) -> None:
        going, self.node = pick(self.node, [w.start for w in self._waiting], max_pulls=self._max_pulls, now=time.time())
        ids = {start.id for start in going}
        admitted = [w for w in self._waiting if w.start.id in ids]
        self._waiting = [w for w in self._waiting if w.start.id not in ids]
        for waiting in admitted:
            waiting.seat.set_result(Seat(self, waiting.start))

    def _give_up(self, waiting: _Waiting) -> None:
        """Who was let in while it gave up leaves again; who stood in the door lets the others pass."""
        if waiting.seat.done():
            waiting.seat.result().leave()
            return
        self._waiting.remove(waiting)
        self._look()

    def _missing(self, waiting: _Waiting) -> str:
        node, start = self.node, waiting.start
        if node.is_cold(start.image) and (start.image in node.pulling or 0 < self._max_pulls <= len(node.pulling)):
            return f"waited for image {start.image}: {len(node.pulling)} pulls under way, {self._max_pulls} at once (waves.max_pulls)"
        before = self._waiting.index(waiting)
        reserved = f"{node.reserved.memory_mb} of {node.total.memory_mb} MiB and {node.reserved.milli_cpus / 1000:g} CPUs reserved"
        return f"waited for room on the node: {reserved}, {before} before it (runners.memory_mb, runners.cpus, budgets.queue)"


def _too_big(total: Need, need: Need) -> str:
    asked = f"the sandbox needs {need.memory_mb} MiB and {need.milli_cpus / 1000:g} CPUs"
    return f"{asked}, this runner may reserve {total.memory_mb} MiB and {total.milli_cpus / 1000:g} CPUs (runners.memory_mb, runners.cpus)"
