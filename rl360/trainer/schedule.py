"""The scheduler as a machine: opens steps, requests and admits attempts, closes steps, ends the run.

Everything it says follows from the journal and the recipe; only waves and deadlines (`on_tick`) ask for the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.config import Config
from rl360.trainer import progress, rollouts
from rl360.trainer.draw import TaskRef, draw
from rl360.trainer.group_filter import attempts_of
from rl360.trainer.metrics import StepTally, belongs
from rl360.trainer.progress import Progress
from rl360.trainer.rollouts import Rollouts

FOLDED: Final[tuple[type[ev.Event], ...]] = tuple(
    dict.fromkeys((*progress.FOLDED, *rollouts.FOLDED, ev.TrajectoryMerged, ev.GroupDecided, ev.StepClosed, ev.RunFinished))
)
"""What the machine reads, what it emits included."""

EVAL_GROUPS: Final = 500
"""Groups of an evaluation are numbered from here, so that their subjects differ from those of the training step."""


@dataclass(frozen=True)
class TaskPool:
    """`train` is drawn from; all of `held_out` is evaluated each time."""

    train: tuple[TaskRef, ...]
    held_out: tuple[TaskRef, ...] = ()


class Scheduler:
    """`on` gives StepOpened, RolloutRequested, StepClosed and RunFinished; `on_tick` gives RolloutAdmitted and InfraFailed."""

    def __init__(self, run: str, config: Config, pool: TaskPool) -> None:
        self._run, self._config, self._pool = run, config, pool
        self._progress = Progress()
        self._rollouts = Rollouts(config.waves, config.agent.max_lives)
        self._tasks = {task.digest: task for task in (*pool.train, *pool.held_out)}
        self._tallies: dict[tuple[ev.Purpose, int], StepTally] = {}  # of steps that are not closed
        self._known: set[tuple[ev.Purpose, int]] = set()
        self._started = False
        self._next = 0  # training step to open

    def on(self, recorded: Recorded) -> Sequence[ev.Event]:
        event = recorded.event
        self._started |= isinstance(event, ev.RunStarted)
        self._progress.on(event)
        self._rollouts.on(recorded)
        return [*self._follow(event), *self._close(event), *self._open(), *self._end()]

    def on_tick(self, now: float) -> Sequence[ev.Event]:
        return list(self._rollouts.due(now))

    # ------------------------------------------------------------------------------------------------ opening

    def _open(self) -> Iterator[ev.StepOpened]:
        step, config = self._next, self._config
        if not self._started or step >= config.run.steps or not self._progress.may_open(config.run.schedule, step, config.push.every):
            return
        self._next += 1
        tasks = draw(self._pool.train, seed=self._config.run.seed, step=step, count=self._config.tasks.groups_per_step)
        yield self._opened(ev.Purpose.TRAIN, step, tasks, self._config.tasks.attempts_per_group, first=0)
        if self._evaluates(step):
            yield self._evaluation(step)

    def _evaluates(self, step: int) -> bool:
        every = self._config.tasks.eval_every
        return bool(every and self._pool.held_out) and (step % every == 0 or step == self._config.run.steps)

    def _evaluation(self, step: int) -> ev.StepOpened:
        return self._opened(ev.Purpose.EVAL, step, self._pool.held_out, self._config.tasks.eval_attempts, first=EVAL_GROUPS)

    def _opened(self, purpose: ev.Purpose, step: int, tasks: Sequence[TaskRef], attempts: int, first: int) -> ev.StepOpened:
        groups = tuple(
            ev.GroupSpec(group=first + i, task=t.name, digest=t.digest, domain=t.domain, attempts=attempts) for i, t in enumerate(tasks)
        )
        return ev.StepOpened(run=self._run, step=step, version=self._progress.pushed, groups=groups, purpose=purpose)

    # ------------------------------------------------------------------------------------------------ a step's life

    def _follow(self, event: ev.Event) -> Iterator[ev.RolloutRequested]:
        """Fold an event into the tally of its step; a step that the journal opened requests its attempts."""
        if isinstance(event, ev.StepOpened):
            if (event.purpose, event.step) in self._known:
                return
            self._known.add((event.purpose, event.step))
            self._tallies[event.purpose, event.step] = StepTally(event)
            for spec in event.groups:
                yield from self._requests(event, spec)
        elif (tally := self._tallies.get((belongs(event), event.step))) is not None:
            tally.add(event)

    def _requests(self, opened: ev.StepOpened, spec: ev.GroupSpec) -> Iterator[ev.RolloutRequested]:
        budgets = rollouts.budgets(self._config.budgets, self._tasks.get(spec.digest))
        for index, attempt in enumerate(attempts_of(opened, spec)):
            yield ev.RolloutRequested(
                run=self._run,
                step=opened.step,
                attempt=attempt,
                group=spec.group,
                index=index,
                task=spec.task,
                digest=spec.digest,
                budgets=budgets,
                purpose=opened.purpose,
            )

    def _close(self, event: ev.Event) -> Iterator[ev.StepClosed]:
        """A training step ends with its optimizer step or the reason for skipping it (S21), an evaluation with its last group."""
        if isinstance(event, ev.StepClosed):
            self._tallies.pop((event.purpose, event.step), None)
        elif isinstance(event, ev.StepTrained):
            tally = self._tallies.get((ev.Purpose.TRAIN, event.step))
            if tally is not None:
                yield tally.closed(skipped=event.skipped, why=event.why)
        elif isinstance(event, ev.GroupDecided) and event.purpose is ev.Purpose.EVAL:
            tally = self._tallies.get((ev.Purpose.EVAL, event.step))
            if tally is not None and tally.complete:
                yield tally.closed()

    def _end(self) -> Iterator[ev.StepOpened | ev.RunFinished]:
        """After the last push: a last evaluation, then the end."""
        steps = self._config.run.steps
        if not self._progress.pushed_after(steps - 1):
            return
        if self._evaluates(steps) and not self._progress.opened(ev.Purpose.EVAL, steps):
            yield self._evaluation(steps)
        elif not self._tallies:
            yield ev.RunFinished(run=self._run, why="steps", steps=steps)
