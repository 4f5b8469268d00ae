"""Starts on nodes, event by event: the functions that decide are those of the scheduler and of the runner. Pure; seeded by whoever calls.

Assumed beside the numbers of `World`: a pull that fails is thrown away whole; a node out of memory kills the sandbox that uses
most, and that attempt is lost; nothing else fails. Sandboxes that want more CPU than there is are slower, which isn't counted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rl360.agents.placement import Need, Node, nodes_of, place
from rl360.agents.simulate.registry import Registry
from rl360.agents.simulate.world import Scheme, Tally, World
from rl360.agents.waves import Start, pick, pull_share, retry_at, wave_size

Random = Callable[[], float]  # in [0, 1)


@dataclass
class _Attempt:
    number: int
    image: str
    declared: Need
    node: str = ""
    tries: int = 0
    began: float = 0.0  # its newest try
    over: bool = False


@dataclass
class _Machine:
    node: Node
    waiting: list[Start] = field(default_factory=list[Start])
    uses: dict[int, int] = field(default_factory=dict[int, int])  # attempt -> MiB


def simulate(world: World, scheme: Scheme, random: Random) -> Tally:
    """All starts are asked for at time 0."""
    return _Fleet(world, scheme, random).run()


class _Fleet:
    def __init__(self, world: World, scheme: Scheme, random: Random) -> None:
        self._world, self._scheme, self._random = world, scheme, random
        self._rules = scheme.rules(world)
        self._max_pulls = pull_share(self._rules, world.nodes)
        names = [f"node{i}" for i in range(world.nodes)]
        total = world.total if scheme.reserved else Need()
        self._machines = {name: _Machine(Node(total=total)) for name in names}
        self._load = dict.fromkeys(names, 0)
        self._attempts = _attempts(world, random)
        spread = world.spread if scheme.pinned else world.nodes
        self._nodes_of = {image: nodes_of(image, names, spread) for image in {a.image for a in self._attempts}}
        self._pending = deque(self._attempts)
        self._starting = 0
        self._last_wave: float | None = None
        self._registry = Registry(world.registry_rate, world.pull_rate, world.image_mb)
        self._pulling: dict[int, int] = {}  # attempt -> its pull
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._events = 0
        self._now = 0.0
        self.tally = Tally()

    def run(self) -> Tally:
        self._at(0.0, self._wave)
        while True:
            due = self._registry.next()
            if due is not None and (not self._queue or due[0] <= self._queue[0][0]):
                self._now = due[0]
                self._pulled(self._attempts[due[1] % len(self._attempts)])
            elif self._queue:
                self._now, _, event = heapq.heappop(self._queue)
                event()
            else:
                self.tally.pulled_mb = self._registry.served
                return self.tally

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._events += 1
        heapq.heappush(self._queue, (when, self._events, event))

    # ------------------------------------------------------------------------------------------------ admission

    def _wave(self) -> None:
        """The scheduler's door, as often as a wave may be due."""
        size = wave_size(self._rules, pending=len(self._pending), starting=self._starting, last=self._last_wave, now=self._now)
        for _ in range(size):
            self._admit(self._pending.popleft())
        if size:
            self._last_wave = self._now
        if self._pending:
            self._at(self._now + self._rules.interval, self._wave)

    def _admit(self, attempt: _Attempt) -> None:
        self._starting += 1
        attempt.node = place(self._nodes_of[attempt.image], self._load)
        self._load[attempt.node] += self._weight(attempt)
        self._wait(attempt, self._now)

    def _weight(self, attempt: _Attempt) -> int:
        """Load is what is reserved, or else how many there are."""
        return attempt.declared.memory_mb if self._scheme.reserved else 1

    def _wait(self, attempt: _Attempt, due: float) -> None:
        need = attempt.declared if self._scheme.reserved else Need()
        self._machines[attempt.node].waiting.append(Start(id=str(attempt.number), image=attempt.image, need=need, due=due))
        self._at(due, lambda: self._look(attempt.node))

    def _look(self, name: str) -> None:
        """The runner's door."""
        machine = self._machines[name]
        going, machine.node = pick(machine.node, machine.waiting, max_pulls=self._max_pulls, now=self._now)
        ids = {start.id for start in going}
        machine.waiting = [start for start in machine.waiting if start.id not in ids]
        for start in going:
            self._begin(self._attempts[int(start.id)], cold=machine.node.is_cold(start.image))

    # ------------------------------------------------------------------------------------------------ start

    def _begin(self, attempt: _Attempt, *, cold: bool) -> None:
        attempt.tries += 1
        attempt.began = self._now
        if not cold:
            self._at(self._now + self._world.start, lambda: self._ready(attempt))
            return
        self.tally.pulls += 1
        pull = self._pulling[attempt.number] = attempt.tries * len(self._attempts) + attempt.number
        self._registry.begin(pull, self._now)
        self.tally.pulls_peak = max(self.tally.pulls_peak, self._registry.pulls)
        self._at(self._now + self._world.pull_timeout, lambda: self._too_slow(attempt, pull))

    def _pulled(self, attempt: _Attempt) -> None:
        self._registry.end(self._pulling.pop(attempt.number), self._now)
        self._at(self._now + self._world.start, lambda: self._ready(attempt))

    def _too_slow(self, attempt: _Attempt, pull: int) -> None:
        if self._pulling.get(attempt.number) != pull:
            return
        self._registry.end(self._pulling.pop(attempt.number), self._now)
        self.tally.lost += self._now - attempt.began
        machine = self._machines[attempt.node]
        machine.node = machine.node.started(attempt.image, ok=False)
        due = retry_at(self._rules, tries=attempt.tries, now=self._now, random=self._random())
        if due is None:
            self.tally.pull_failed += 1
            self._starting -= 1
            self._end(attempt)
            return
        self.tally.retries += 1
        self._leave(attempt)
        self._wait(attempt, due)

    # ------------------------------------------------------------------------------------------------ work

    def _ready(self, attempt: _Attempt) -> None:
        world, machine = self._world, self._machines[attempt.node]
        machine.node = machine.node.started(attempt.image, ok=True)
        self._starting -= 1
        self.tally.seen_ready(self._now, world.starts)
        work = world.run * (0.5 + self._random())
        build = self._now + max(0.0, work - world.build) * self._random()
        self._use(attempt, attempt.declared.memory_mb // 4)
        self._at(build, lambda: self._use(attempt, attempt.declared.memory_mb))
        self._at(build + world.build, lambda: self._use(attempt, attempt.declared.memory_mb // 4))
        self._at(self._now + max(work, world.build), lambda: self._end(attempt))
        self._look(attempt.node)

    def _use(self, attempt: _Attempt, memory_mb: int) -> None:
        """It uses so much memory from now on. A node that has less kills who uses most, until the others fit."""
        if attempt.over:
            return
        machine, total = self._machines[attempt.node], self._world.node_memory_mb
        machine.uses[attempt.number] = memory_mb
        used = sum(machine.uses.values())
        self.tally.node_memory_peak = max(self.tally.node_memory_peak, used / total)
        while sum(machine.uses.values()) > total:
            self._kill(self._attempts[max(machine.uses, key=lambda number: machine.uses[number])])

    def _kill(self, attempt: _Attempt) -> None:
        self.tally.killed += 1
        self.tally.lost += self._now - attempt.began
        self._end(attempt)

    def _end(self, attempt: _Attempt) -> None:
        if attempt.over:
            return
        attempt.over = True
        self._machines[attempt.node].uses.pop(attempt.number, None)
        self._load[attempt.node] -= self._weight(attempt)
        self._leave(attempt)

    def _leave(self, attempt: _Attempt) -> None:
        machine = self._machines[attempt.node]
        if self._scheme.reserved:
            machine.node = machine.node.end(attempt.declared)
        self._look(attempt.node)


def _attempts(world: World, random: Random) -> list[_Attempt]:
    """Attempts of a group follow each other, as the scheduler asks for them."""
    heavy = [random() < world.heavy for _ in range(world.images)]
    images = [number * world.images // world.starts for number in range(world.starts)]
    return [_Attempt(number, f"image{image}", world.declared(heavy=heavy[image])) for number, image in enumerate(images)]
