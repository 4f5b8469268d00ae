"""One step under a set of rules. Pure: the functions that the filter, the trainer and the audit call do the deciding.

Sound rules go through `decide_group` as they are. The habits of older systems (`ReplayRules`) are put together from the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rl360.bus import events as ev
from rl360.replay.facts import ReplayError, StepFacts
from rl360.replay.rules import ReplayRules
from rl360.trainer.advantages import advantages
from rl360.trainer.groups import GroupContext, Verdict, decide_group, judge, why_dropped
from rl360.trainer.outcomes import AttemptOutcome
from rl360.trainer.step_batch import StepBatch, make_batch


@dataclass(frozen=True)
class Decision:
    """A step decided. `batch` has all samples with advantage and token weight; its divisor counts valid samples alone.

    `divisor` is what these rules divide by. Attempt lists are of kept groups.
    """

    rules: ReplayRules
    groups: tuple[ev.GroupDecided, ...]
    batch: StepBatch
    divisor: float
    lost: tuple[str, ...]  # attempts of kept groups that are masked

    @property
    def trained(self) -> tuple[tuple[ev.GroupDecided, ev.AttemptDecision], ...]:
        """Attempts that train, each with its group."""
        return tuple((g, a) for g in self.groups if g.kept for a in g.attempts if a.advantage is not None)

    @property
    def kept_samples(self) -> int:
        """Attempts of kept groups, masked ones included."""
        return len(self.trained) + len(self.lost)


@dataclass(frozen=True)
class _Judged:
    spec: ev.GroupSpec
    outcomes: Sequence[AttemptOutcome]
    verdicts: Sequence[Verdict]


def decide_step(facts: StepFacts, rules: ReplayRules) -> Decision:
    """Decide all groups of a step and make its batch. Raises ReplayError when some attempt is not over yet."""
    if facts.trained_on is None:
        raise ReplayError(f"step {facts.step - 1} is not trained, so it is open which version step {facts.step} trains on")
    context = GroupContext(run=facts.run, step=facts.step, trained_on=facts.trained_on)
    outcomes = {spec.group: _complete(facts, spec) for spec in facts.opened.groups}
    if rules.sound:
        groups = tuple(decide_group(spec, outcomes[spec.group], rules.group, context) for spec in facts.opened.groups)
    else:
        judged = [
            _Judged(spec, outcomes[spec.group], [judge(o, rules.group, context) for o in outcomes[spec.group]])
            for spec in facts.opened.groups
        ]
        groups = tuple(_decide_unsound(judged, rules, context))
    trainer = msgspec.structs.replace(
        facts.config.trainer, loss_reduction=rules.loss_reduction, loss_constant=rules.loss_constant, max_staleness=rules.max_staleness
    )
    batch = make_batch(facts.step, facts.trained_on, groups, facts.outcomes, trainer)
    lost = tuple(a.attempt for g in groups if g.kept for a in g.attempts if a.fate is ev.Fate.MASKED)
    return Decision(rules, groups, batch, batch.divisor + _counted(rules, len(lost)), lost)


def _complete(facts: StepFacts, spec: ev.GroupSpec) -> list[AttemptOutcome]:
    found = facts.attempts(spec)
    complete = [o for o in found if o is not None]
    if len(complete) < len(found):
        raise ReplayError(f"step {facts.step} group {spec.group}: {len(found) - len(complete)} of {len(found)} attempts are not over yet")
    return complete


def _counted(rules: ReplayRules, lost: int) -> float:
    """What masked samples add to the divisor: they have no token, so a token mean doesn't see them."""
    if rules.failures_in_divisor == "out" or rules.loss_reduction == "token_mean":
        return 0.0
    return lost * (rules.loss_constant if rules.loss_reduction == "constant" else 1.0)


# ---------------------------------------------------------------------------------------------------- unsound rules


def _decide_unsound(judged: Sequence[_Judged], rules: ReplayRules, context: GroupContext) -> Iterator[ev.GroupDecided]:
    reasons = {j.spec.group: _why_dropped(j, rules) for j in judged}
    kept = [j for j in judged if not reasons[j.spec.group]]
    whole = rules.baseline == "batch" or (rules.baseline == "batch_unless_full" and len(kept) < len(judged))
    shares: dict[str, float] = {}
    baselines: dict[int, float] = {}
    for scope in [kept] if whole else [[j] for j in kept]:
        if not scope:
            continue
        baseline, values = _advantages(scope, rules)
        shares |= values
        baselines |= {j.spec.group: baseline for j in scope}
    for j in judged:
        yield _decided(j, reasons[j.spec.group], baselines.get(j.spec.group), shares, context)


def _advantages(scope: Sequence[_Judged], rules: ReplayRules) -> tuple[float, Mapping[str, float]]:
    """Baseline over all attempts of `scope` that the rules count, and the advantages of the valid ones."""
    verdicts = [v for j in scope for v in j.verdicts]
    counted = [v for v in verdicts if v.fate is None or (rules.failures_in_baseline == "zero" and v.fate is ev.Fate.MASKED)]
    result = advantages([_reward(v) for v in counted], std=rules.advantage_std)
    pairs = zip(counted, result.values, strict=True)
    return result.baseline, {v.attempt: advantage for v, advantage in pairs if v.fate is None}


def _reward(verdict: Verdict) -> float:
    """A failure is an answer of reward 0 here: the fault that these rules reproduce."""
    return verdict.reward if verdict.fate is None and verdict.reward is not None else 0.0


def _why_dropped(judged: _Judged, rules: ReplayRules) -> str:
    valid = [v for v in judged.verdicts if v.fate is None]
    if rules.filter == "valid":
        return why_dropped(judged.verdicts, judged.outcomes)
    if not valid:
        return ev.DropReason.INSUFFICIENT_VALID
    if rules.filter == "off":
        return ""
    rewards = {_reward(v) for v in judged.verdicts if v.fate is not ev.Fate.STALE}
    if len(rewards) > 1:
        return ""
    return ev.DropReason.ALL_PASS if rewards and min(rewards) > 0 else ev.DropReason.ALL_FAIL


def _decided(judged: _Judged, reason: str, baseline: float | None, shares: Mapping[str, float], context: GroupContext) -> ev.GroupDecided:
    kept = not reason
    attempts = tuple(
        ev.AttemptDecision(
            attempt=v.attempt,
            fate=v.fate or (ev.Fate.TRAINED if kept else ev.Fate.DROPPED),
            reason=v.reason if v.fate else reason or v.reason,
            raw_reward=v.raw,
            reward=v.reward,
            advantage=shares.get(v.attempt) if kept else None,
        )
        for v in judged.verdicts
    )
    valid = sum(v.fate is None for v in judged.verdicts)
    return ev.GroupDecided(
        run=context.run,
        step=context.step,
        group=judged.spec.group,
        domain=judged.spec.domain,
        kept=kept,
        reason=reason,
        baseline=baseline,
        n_valid=valid,
        attempts=attempts,
        purpose=context.purpose,
    )
