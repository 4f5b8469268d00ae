"""A task is used only when its verifier tells nothing from everything: a no-op run must give the lowest reward, the
task's own solution the highest. Found in the wild: tests that exit before they write a reward, rewards that never vary.

Results are kept by the task's digest, so a task is qualified once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.leases import Lease
from rl360.agents.sandbox.make import SandboxMaker
from rl360.agents.staging import Stage, Staged
from rl360.agents.tasks import Task, TaskError
from rl360.agents.verify import verify
from rl360.config import Config

_WORKERS: Final = 4


class Qualification(msgspec.Struct, frozen=True, kw_only=True):
    """What the two runs gave. `problem` is empty for a qualified task."""

    task: str
    digest: str
    noop: float | None
    oracle: float | None
    problem: str = ""


def qualify_all(tasks: Iterable[Task], *, sandboxes: Path, cache: Path, config: Config) -> tuple[Qualification, ...]:
    """Qualify every task; raises TaskError with all problems when one is not. Blocks; some 0.1 CPU seconds a new task.

    `sandboxes` is the folder of leases of the run, `cache` a folder of results (made when missing; runs may share it).
    """
    cache.mkdir(parents=True, exist_ok=True)
    chosen = tuple(tasks)
    known = {task.digest: found for task in chosen if (found := _cached(cache / f"{task.digest}.json"))}
    new = [task for task in chosen if task.digest not in known]
    if new:
        known |= {q.digest: q for q in _qualify(new, sandboxes, config)}
        for task in new:
            _keep(cache / f"{task.digest}.json", known[task.digest])
    results = tuple(known[task.digest] for task in chosen)
    if problems := [f"{q.task}: {q.problem}" for q in results if q.problem]:
        raise TaskError(f"{len(problems)} of {len(results)} tasks don't qualify; mend them or take them out:\n  " + "\n  ".join(problems))
    return results


def _qualify(tasks: Sequence[Task], sandboxes: Path, config: Config) -> list[Qualification]:
    lease = Lease(sandboxes, f"qualify-{os.getpid()}-{time.time_ns():x}")
    try:
        maker, stage = SandboxMaker(config.sandbox, lease, f"{config.run.name}-qualify"), Stage(lease.folder / "tasks")

        def one(number: int, task: Task) -> Qualification:
            return qualify(task, stage.get(task), maker, config, number)

        with ThreadPoolExecutor(_WORKERS) as pool:
            results = list(pool.map(one, range(len(tasks)), tasks))
        maker.close()
        return results
    finally:
        lease.release()


def qualify(task: Task, staged: Staged, maker: SandboxMaker, config: Config, number: int = 0) -> Qualification:
    """Both runs of one task. What goes wrong is its `problem`, never an exception."""
    noop: float | None = None
    oracle: float | None = None
    problem = ""
    try:
        noop = _reward(task, staged, maker, config, number, solve=False)
        if staged.solution is None:
            problem = "solution/solve.sh is missing, so the highest reward can't be shown to be within reach"
        else:
            oracle = _reward(task, staged, maker, config, number, solve=True)
    except InfraError as e:
        problem = f"{'the no-op' if noop is None else 'the oracle'} run gave no reward: {e}"
    if not problem and noop != task.low:
        problem = f"doing nothing is rewarded with {noop:g}; the lowest reward, {task.low:g}, must be what it gets"
    if not problem and oracle != task.high:
        problem = f"the oracle is rewarded with {oracle:g}; the highest reward, {task.high:g}, must be what it gets"
    return Qualification(task=task.name, digest=task.digest, noop=noop, oracle=oracle, problem=problem)


def _reward(task: Task, staged: Staged, maker: SandboxMaker, config: Config, number: int, *, solve: bool) -> float:
    name = f"{task.digest[:16]}-{'oracle' if solve else 'noop'}"
    seen = {"/solution": staged.solution} if solve and staged.solution else {}
    sandbox = maker.make(name, number, task, staged, config.budgets.setup, seen)
    try:
        sandbox.start()
        if solve:
            sandbox.exec("bash /solution/solve.sh", task.budgets(config.budgets).agent, task.solution_env)
        return verify(sandbox, task, staged, started=time.time(), timeout=task.budgets(config.budgets).verify).reward
    finally:
        sandbox.close()


def _cached(path: Path) -> Qualification | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Qualification)
    except (OSError, msgspec.MsgspecError):
        return None


def _keep(path: Path, result: Qualification) -> None:
    """Only a qualified task is remembered: a failure may have been this machine's."""
    if not result.problem:
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_bytes(msgspec.json.encode(result))
        aside.replace(path)
