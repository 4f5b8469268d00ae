"""How often a policy passes a task: N attempts, each kept as it ends, told as a band beside its n and seed.

A task that is always or never passed has no gradient to give. Results are kept by task digest, policy and seed; an attempt
without a reward is no failure of the policy: it is counted apart, and tried again the next time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import blake3
import msgspec

from rl360.agents.outcomes import InfraError
from rl360.agents.play import Endpoint, HarnessOf, run_agent
from rl360.agents.playground import Place, Playground
from rl360.agents.tasks import Task

BANDS: Final = ("0%", "0-20%", "20-40%", "40-60%", "60-80%", "80-100%", "100%")
UNKNOWN: Final = "unknown"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What attempts at one task gave. `rewards` by attempt index; `failures`: why others have none; a pass gives `passed`."""

    task: str
    digest: str
    policy: str
    seed: int
    passed: float
    rewards: dict[int, float] = {}
    failures: dict[int, str] = {}

    @property
    def n(self) -> int:
        """Attempts with a reward: those without say nothing about the policy."""
        return len(self.rewards)

    @property
    def passes(self) -> int:
        return sum(reward >= self.passed for reward in self.rewards.values())

    @property
    def band(self) -> str:
        return band(self.passes, self.n)

    def took(self, index: int, outcome: float | str) -> Calibration:
        """With one more attempt: its reward, or why it has none."""
        if isinstance(outcome, str):
            return msgspec.structs.replace(self, failures={**self.failures, index: outcome})
        return msgspec.structs.replace(self, rewards={**self.rewards, index: outcome})


def band(passes: int, n: int) -> str:
    """The band of a pass rate; its upper bound belongs to it, and never and always have bands of their own.

    >>> band(0, 16), band(4, 16), band(16, 16), band(0, 0)
    ('0%', '20-40%', '100%', 'unknown')
    """
    if n == 0:
        return UNKNOWN
    if passes in (0, n):
        return BANDS[0] if passes == 0 else BANDS[-1]
    return BANDS[1 + (5 * passes - 1) // n]


def counted(results: Iterable[Calibration]) -> dict[str, int]:
    """Tasks in each band, all bands in order."""
    found = Counter(result.band for result in results)
    return {name: found[name] for name in (*BANDS, UNKNOWN) if name in BANDS or found[name]}


class Kept:
    """Results in a folder, one file a task, policy and seed; written whole after every attempt."""

    def __init__(self, folder: Path, policy: str, seed: int) -> None:
        self._folder, self._policy, self._seed = folder, policy, seed
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, task: Task) -> Calibration:
        """What is known; failures of earlier calls stay in the file, and are tried again: they may have been this machine's."""
        new = Calibration(task=task.name, digest=task.digest, policy=self._policy, seed=self._seed, passed=task.high)
        try:
            known = msgspec.json.decode(self._path(task).read_bytes(), type=Calibration)
        except (OSError, msgspec.MsgspecError):
            return new
        same = (known.digest, known.policy, known.seed) == (new.digest, new.policy, new.seed)
        return msgspec.structs.replace(new, rewards=known.rewards) if same else new

    def put(self, task: Task, result: Calibration) -> None:
        path = self._path(task)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_bytes(msgspec.json.encode(result))
        aside.replace(path)

    def _path(self, task: Task) -> Path:
        return self._folder / f"{task.digest[:32]}-{fingerprint(self._policy, self._seed)}.json"


def fingerprint(*parts: object) -> str:
    return blake3.blake3(repr(parts).encode()).hexdigest()[:16]


def calibrate(
    tasks: Sequence[Task],
    attempts: int,
    kept: Kept,
    ground: Playground,
    harness_of: HarnessOf,
    endpoint: Endpoint,
    each: Callable[[Calibration], None],
    workers: int,
) -> None:
    """Play what is missing of `attempts` at each task; `each` is told a task's result after each attempt. Blocks."""
    results = {task.digest: kept.get(task) for task in tasks}
    missing = [(task, i) for i in range(attempts) for task in tasks if i not in results[task.digest].rewards]
    for task in tasks:
        each(results[task.digest])

    def play(job: tuple[Task, int]) -> tuple[Task, int, float | str]:
        task, index = job
        return task, index, _attempt(task, index, results[task.digest].seed, ground, harness_of, endpoint)

    def took(done: tuple[Task, int, float | str]) -> None:
        task, index, outcome = done
        results[task.digest] = result = results[task.digest].took(index, outcome)
        kept.put(task, result)
        each(result)

    if missing:
        ground.each(missing, play, took, workers)


def _attempt(task: Task, index: int, seed: int, ground: Playground, harness_of: HarnessOf, endpoint: Endpoint) -> float | str:
    name = f"{task.digest[:16]}-{index}"
    seeded = replace(endpoint, request={**endpoint.request, "seed": (seed * 1_000_003 + index) % 2**31})

    def act(place: Place) -> None:
        run_agent(place, name, seeded, ground.config.agent, harness_of, ground.scratch)

    try:
        return ground.play(task, name, act).reward
    except InfraError as e:
        return str(e)
