"""The group filter as a machine: folds outcomes, decides a group as soon as all of its attempts are over (S16, S18).

A group of a training step also waits for the step before it to be trained: only then is it known which version the step
trains on, and staleness is judged against that (S24). It never delays the trainer, which needs that step as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.trainer.groups import GroupContext, Rules, decide_group
from rl360.trainer.outcomes import OUTCOME_TYPES, Outcomes

FOLDED: Final[tuple[type[ev.Event], ...]] = (ev.StepOpened, ev.StepTrained, *OUTCOME_TYPES, ev.GroupDecided, ev.LateOutcome)
"""What the machine reads, what it emits included."""

_Key = tuple[ev.Purpose, int, int]  # purpose, step, group


class GroupFilter:
    """`on` gives `GroupDecided` once a group, and `LateOutcome` for terminal outcomes after the first."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._outcomes = Outcomes()
        self._waiting: dict[_Key, tuple[ev.StepOpened, ev.GroupSpec]] = {}
        self._trained: dict[int, int] = {}  # step -> version after it

    def on(self, recorded: Recorded) -> Sequence[ev.Event]:
        event = recorded.event
        late = self._outcomes.on(recorded)
        return [*([late] if late else []), *self._decide(self._touched(event))]

    def _touched(self, event: ev.Event) -> list[_Key]:
        """Groups that this event may have completed."""
        if isinstance(event, ev.StepOpened):
            for spec in event.groups:
                self._waiting.setdefault((event.purpose, event.step, spec.group), (event, spec))
        elif isinstance(event, ev.StepTrained):
            self._trained.setdefault(event.step, event.version)
            return [k for k in self._waiting if k[:2] == (ev.Purpose.TRAIN, event.step + 1)]
        elif isinstance(event, ev.VerifierResult | ev.InfraFailed | ev.TrajectoryMerged):
            keys = ((purpose, event.step, event.group) for purpose in ev.Purpose)
            return [k for k in keys if k in self._waiting]
        return []

    def _decide(self, keys: Sequence[_Key]) -> Iterator[ev.GroupDecided]:
        for key in keys:
            opened, spec = self._waiting[key]
            trained_on = self._trained_on(opened)
            outcomes = [self._outcomes.complete(a) for a in attempts_of(opened, spec)]
            complete = [o for o in outcomes if o is not None]
            if trained_on is None or len(complete) < spec.attempts:
                continue
            del self._waiting[key]
            for outcome in complete:
                self._outcomes.forget_samples(outcome.attempt)
            context = GroupContext(run=opened.run, step=opened.step, trained_on=trained_on, purpose=opened.purpose)
            yield decide_group(spec, complete, self._rules, context)

    def _trained_on(self, opened: ev.StepOpened) -> int | None:
        """The version that the step's optimizer step starts from, or None while that is open."""
        if opened.purpose is ev.Purpose.EVAL or opened.step == 0:
            return opened.version
        return self._trained.get(opened.step - 1)


def attempts_of(opened: ev.StepOpened, spec: ev.GroupSpec) -> list[str]:
    """Names of the attempts of one group."""
    return [ev.attempt_id(opened.purpose, opened.step, spec.group, i) for i in range(spec.attempts)]
