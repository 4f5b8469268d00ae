"""How far a run is, and what it may do next: one code path for every schedule.

    sync      step k opens when the version of step k-1 is pushed                                lag 0
    one_step  step k opens when step k-1's rollouts are over and the version of k-2 is pushed;
              the version of k-1 is pushed when step k's rollouts are over: data is one version back    lag 1

With `push.every` = n only every n-th step's version is pushed, and the last one's: a step waits for the newest of those instead, and
its tokens are up to n - 1 versions older still.
So no push ever meets a rollout in flight, and all tokens of a rollout have one version. The scheduler and the trainer's
`PushGate` fold the same events into the same `Progress`; they need no word with each other.
"""

from __future__ import annotations

from typing import Final, Literal

from rl360.bus import events as ev
from rl360.trainer.group_filter import attempts_of

Schedule = Literal["sync", "one_step"]

LAG: Final[dict[Schedule, int]] = {"sync": 0, "one_step": 1}
"""Steps whose rollouts may run on weights that don't know of the step before."""

FOLDED: Final[tuple[type[ev.Event], ...]] = (ev.StepOpened, ev.VerifierResult, ev.InfraFailed, ev.StepTrained, ev.WeightsPushed)


def last_pushed(step: int, every: int) -> int:
    """The newest step up to `step` after which weights are pushed; negative: none.

    >>> [last_pushed(step, 3) for step in range(7)]
    [-1, -1, 2, 2, 2, 5, 5]
    """
    return (step + 1) // every * every - 1


def oldest(schedule: Schedule, every: int) -> int:
    """Versions that a token may lie behind the weights that train on it (S24)."""
    return LAG[schedule] + every - 1


class Progress:
    """Fold of `FOLDED`, idempotent."""

    def __init__(self) -> None:
        self._in_flight: dict[tuple[ev.Purpose, int], set[str]] = {}  # attempts without a terminal outcome
        self._of_attempt: dict[str, tuple[ev.Purpose, int]] = {}
        self._trained: dict[int, int] = {}  # step -> version after it
        self.pushed = 0  # newest version that an engine holds; 0 is the initial checkpoint

    def on(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepOpened):
            self._open(event)
        elif isinstance(event, ev.VerifierResult | ev.InfraFailed):
            if (key := self._of_attempt.pop(event.attempt, None)) is not None:
                self._in_flight[key].discard(event.attempt)
        elif isinstance(event, ev.StepTrained):
            self._trained.setdefault(event.step, event.version)
        elif isinstance(event, ev.WeightsPushed) and any(r.ok for r in event.results):
            self.pushed = max(self.pushed, event.version)

    def _open(self, opened: ev.StepOpened) -> None:
        key = (opened.purpose, opened.step)
        if key not in self._in_flight:
            self._in_flight[key] = {a for spec in opened.groups for a in attempts_of(opened, spec)}
            self._of_attempt |= dict.fromkeys(self._in_flight[key], key)

    def opened(self, purpose: ev.Purpose, step: int) -> bool:
        return (purpose, step) in self._in_flight

    def over(self, purpose: ev.Purpose, step: int) -> bool:
        """The step was opened and each of its attempts has a terminal outcome."""
        return self._in_flight.get((purpose, step)) == set()

    def evaluations_over(self) -> bool:
        return not any(attempts for (purpose, _), attempts in self._in_flight.items() if purpose is ev.Purpose.EVAL)

    def trained(self, step: int) -> bool:
        """The step's optimizer step is done, or was skipped."""
        return step in self._trained

    def pushed_after(self, step: int) -> bool:
        """Engines hold the version that the step left behind; after a skipped step that is the one before (S21)."""
        return step in self._trained and self._trained[step] <= self.pushed

    def may_open(self, schedule: Schedule, step: int, every: int = 1) -> bool:
        """Step `step` may start its rollouts. Their tokens are at most `oldest` versions older than the weights that train on them."""
        behind = last_pushed(step - 1 - LAG[schedule], every)
        return (step == 0 or self.over(ev.Purpose.TRAIN, step - 1)) and (behind < 0 or self.pushed_after(behind))

    def may_push(self, schedule: Schedule, steps: int, every: int = 1) -> bool:
        """The newest version may go to the engines; `steps`: steps of the whole run.

        Nothing is in flight, and nothing is opened before it: the next step waits for a version that is made, or there is no next one.
        It waits until a push succeeds: whatever failed before, and however far training is, one is due.
        """
        newest = max((step for purpose, step in self._in_flight if purpose is ev.Purpose.TRAIN), default=-1)
        waited = last_pushed(newest - LAG[schedule], every)
        due = self.trained(waited) and not self.pushed_after(waited)
        return self.over(ev.Purpose.TRAIN, newest) and self.evaluations_over() and (due or self.trained(steps - 1))


class PushGate:
    """The trainer's view of `Progress`."""

    def __init__(self, schedule: Schedule, steps: int, every: int = 1) -> None:
        self._schedule: Schedule = schedule
        self._steps, self._every = steps, every
        self.progress = Progress()

    def on(self, event: ev.Event) -> None:
        """Fold an event of `FOLDED`."""
        self.progress.on(event)

    def may_push(self) -> bool:
        """No rollout that could see two versions is in flight: the newest version may be pushed now."""
        return self.progress.may_push(self._schedule, self._steps, self._every)
