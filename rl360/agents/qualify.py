"""A task is used only when its verifier tells nothing from everything: a no-op run must give the lowest reward, the
task's own solution the highest. Found in the wild: tests that exit before they write a reward, rewards that never vary.

Results are kept by the task's digest, so a task is qualified once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from rl360.agents.outcomes import InfraError
from rl360.agents.playground import Place, Playground, playground
from rl360.agents.tasks import Task, TaskError
from rl360.config import Config


class Qualification(msgspec.Struct, frozen=True, kw_only=True):
    """What the two runs gave. `problem` is empty for a qualified task."""

    task: str
    digest: str
    noop: float | None
    oracle: float | None
    problem: str = ""


def qualify_all(
    tasks: Iterable[Task], *, sandboxes: Path, cache: Path, config: Config, each: Callable[[Qualification], None] = lambda _: None
) -> tuple[Qualification, ...]:
    """Qualify every task; raises TaskError with all problems when one is not. Blocks; some 0.1 CPU seconds a new task.

    `sandboxes` is the folder of leases of the run, `cache` a folder of results (made when missing; runs may share it).
    """
    results = qualifications(tasks, sandboxes=sandboxes, cache=cache, config=config, each=each)
    if problems := [f"{q.task}: {q.problem}" for q in results if q.problem]:
        raise TaskError(f"{len(problems)} of {len(results)} tasks don't qualify; mend them or take them out:\n  " + "\n  ".join(problems))
    return results


def qualifications(
    tasks: Iterable[Task], *, sandboxes: Path, cache: Path, config: Config, each: Callable[[Qualification], None] = lambda _: None
) -> tuple[Qualification, ...]:
    """What every task gave, `each` told as it is known. A good result is kept at once: who is interrupted goes on from there."""
    cache.mkdir(parents=True, exist_ok=True)
    chosen = tuple(tasks)
    known = {task.digest: found for task in chosen if (found := _cached(cache / f"{task.digest}.json"))}
    for found in known.values():
        each(found)

    def took(new: Qualification) -> None:
        _keep(cache / f"{new.digest}.json", new)
        known[new.digest] = new
        each(new)

    new = [task for task in {task.digest: task for task in chosen}.values() if task.digest not in known]
    if new:
        with playground(sandboxes, config, "qualify") as ground:
            ground.each(new, lambda task: qualify(task, ground), took)
    return tuple(known[task.digest] for task in chosen)


def qualify(task: Task, ground: Playground) -> Qualification:
    """Both runs of one task. What goes wrong is its `problem`, never an exception."""
    noop: float | None = None
    oracle: float | None = None
    problem = ""
    try:
        noop = _reward(task, ground, solve=False)
        if not task.oracle:
            problem = "solution/solve.sh is missing, so the highest reward can't be shown to be within reach"
        else:
            oracle = _reward(task, ground, solve=True)
    except InfraError as e:
        problem = f"{'the no-op' if noop is None else 'the oracle'} run gave no reward: {e}"
    if not problem and noop != task.low:
        problem = f"doing nothing is rewarded with {noop:g}; the lowest reward, {task.low:g}, must be what it gets"
    if not problem and oracle != task.high:
        problem = f"the oracle is rewarded with {oracle:g}; the highest reward, {task.high:g}, must be what it gets"
    return Qualification(task=task.name, digest=task.digest, noop=noop, oracle=oracle, problem=problem)


def _reward(task: Task, ground: Playground, *, solve: bool) -> float:
    def act(place: Place) -> None:
        if solve:
            place.sandbox.exec("bash /solution/solve.sh", place.seconds, place.task.solution_env)

    return ground.play(task, f"{task.digest[:16]}-{'oracle' if solve else 'noop'}", act, see_solution=solve).reward


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
