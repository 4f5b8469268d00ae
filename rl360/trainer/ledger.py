"""What the journal says to the trainer: which step can train and on what, and which engines need which version. Pure.

The trainer's own place is not in here: after a restart it is the checkpoint's. A step whose StepTrained the journal holds already
is made again when the checkpoint was lost, with the same result, and published no second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rl360 import config
from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.engines import membership
from rl360.engines.membership import Membership
from rl360.trainer import progress
from rl360.trainer.batch import plan_batch
from rl360.trainer.commands import Train
from rl360.trainer.outcomes import OUTCOME_TYPES, Outcomes
from rl360.trainer.progress import PushGate
from rl360.trainer.step_batch import StepBatch, make_batch

FOLDED: Final[tuple[type[ev.Event], ...]] = tuple(dict.fromkeys((*progress.FOLDED, *OUTCOME_TYPES, ev.GroupDecided, *membership.FOLDS)))


@dataclass(frozen=True)
class PushOrder:
    """Bring `engines` (generation: URL) to `version`, made by `step`; `attempt` counts the pushes of that version."""

    version: int
    step: int
    engines: Mapping[str, str]
    attempt: int


class Ledger:
    """Fold of `FOLDED`, in journal order."""

    def __init__(self, run: str, config: config.Config) -> None:
        self._config = config
        self._outcomes = Outcomes()
        self._gate = PushGate(config.run.schedule, config.run.steps, config.push.every)
        self._members = Membership(run, grace=config.engine.lease_seconds)
        self._groups: dict[int, int] = {}  # training step -> groups it opened with
        self._decided: dict[int, dict[int, ev.GroupDecided]] = {}
        self._trained: dict[int, ev.StepTrained] = {}
        self._done = -1

    def on(self, recorded: Recorded) -> None:
        event = recorded.event
        self._outcomes.on(recorded)
        self._gate.on(event)
        self._members.on(recorded)
        if isinstance(event, ev.StepOpened) and event.purpose is ev.Purpose.TRAIN:
            self._groups.setdefault(event.step, len(event.groups))
        elif isinstance(event, ev.GroupDecided):
            if event.purpose is ev.Purpose.EVAL or event.step <= self._done:
                self._forget(event)
            else:
                self._decided.setdefault(event.step, {}).setdefault(event.group, event)
        elif isinstance(event, ev.StepTrained):
            self._trained.setdefault(event.step, event)

    def trained(self, step: int) -> ev.StepTrained | None:
        """What the journal says about the step's training."""
        return self._trained.get(step)

    # ------------------------------------------------------------------------------------------------ training

    def batch(self, step: int, version: int) -> StepBatch | None:
        """The step's batch for weights of `version`, once all of its groups are decided."""
        decided = self._decided.get(step, {})
        if step not in self._groups or len(decided) < self._groups[step]:
            return None
        return make_batch(step, version, decided.values(), self._outcomes, self._config.trainer)

    def done(self, step: int) -> None:
        """Steps up to this one are trained and in a checkpoint: their samples are no longer needed."""
        self._done = max(self._done, step)
        for old in [s for s in self._decided if s <= self._done]:
            for group in self._decided.pop(old).values():
                self._forget(group)

    def _forget(self, group: ev.GroupDecided) -> None:
        for attempt in group.attempts:
            self._outcomes.forget_samples(attempt.attempt)

    # ------------------------------------------------------------------------------------------------ push

    def push(self, version: int, made_by: int) -> PushOrder | None:
        """The push that is due when the trainer holds `version`, made by training step `made_by` (-1: the starting policy).

        A new version goes to all engines at once, when no rollout could see two versions. Until then an engine that joins
        gets the version that the others serve: it has no traffic before.
        """
        served = self._members.floor
        if version < served:
            return None  # the checkpoint was lost: that version is being made again
        new = version > served and (made_by < 0 or self._gate.may_push())
        target = version if new else served
        engines = {} if target < 0 else self._members.live() if new else self._members.behind(target)
        step = made_by if target == version else self._maker(target)
        return PushOrder(target, step, engines, self._members.pushes(target) + 1) if engines else None

    def _maker(self, version: int) -> int:
        """The step that made a version; -1: none, it is the starting policy."""
        return next((step for step, event in self._trained.items() if event.version == version and not event.skipped), -1)


def command(batch: StepBatch, *, dp: int, microbatch_tokens: int) -> Train:
    """The step as all ranks get it."""
    plan = plan_batch(batch.refs, dp=dp, microbatch_tokens=microbatch_tokens)
    ranks = tuple(tuple(m.samples for m in rank) for rank in plan.ranks)
    return Train(version=batch.version, ranks=ranks, divisor=batch.divisor, versions=batch.versions)
