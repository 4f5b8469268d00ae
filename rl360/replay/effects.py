"""What a set of rules does to a step, in the numbers of the step-70 arithmetic and in the tokens' coefficients. Pure.

A loss is a sum over sampled tokens of coefficient x d(log-prob) as long as nothing is clipped; a token's coefficient is
advantage x weight / divisor. `norm_ratio` and `cosine` compare those coefficients over all tokens: what the rules do to the gradient
before the model has its say. `rl360 replay --gradient` measures the gradient itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl360.bus import events as ev
from rl360.replay.decide import Decision


@dataclass(frozen=True)
class Effects:
    """What a set of rules does to a step, against one valid set for everything under the same reduction (the step-70 arithmetic)."""

    gradient_scale: float | None  # divisor over valid samples / divisor used; None: nothing trains
    advantage_shift: float | None  # mean over trained attempts of (valid mean of their group - baseline used)
    baseline: float | None  # mean over trained attempts
    kept_mean: float | None  # mean reward of trained attempts
    logged_mean: float | None  # the step's reward as these rules log it: failures as 0 where they count them
    logged_n: int
    tis_factor: float | None  # what a mean over samples with these rules' denominator logs for a ratio of 1
    norm_ratio: float | None  # of the token coefficients, against the recorded decision; None: nothing trains on one side
    cosine: float | None


def effects(decision: Decision, recorded: Decision) -> Effects:
    """Of a step decided, beside what was decided in the run."""
    ratio, cosine = coefficients(recorded, decision)
    zero = decision.rules.failures_in_baseline == "zero"
    everyone = [a for g in decision.groups for a in g.attempts]
    logged = [a.reward if _valid(a) and a.reward is not None else 0.0 for a in everyone if zero or _valid(a)]
    trained = decision.trained
    if not trained or not decision.divisor:
        return Effects(None, None, None, None, _mean(logged), len(logged), None, ratio, cosine)
    counted = decision.rules.failures_in_divisor == "counted"
    return Effects(
        gradient_scale=decision.batch.divisor / decision.divisor,
        advantage_shift=_mean([_valid_mean(g) - (g.baseline or 0.0) for g, _ in trained]),
        baseline=_mean([g.baseline or 0.0 for g, _ in trained]),
        kept_mean=_mean([a.reward or 0.0 for _, a in trained]),
        logged_mean=_mean(logged),
        logged_n=len(logged),
        tis_factor=len(trained) / decision.kept_samples if counted else 1.0,
        norm_ratio=ratio,
        cosine=cosine,
    )


def coefficients(before: Decision, after: Decision) -> tuple[float | None, float | None]:
    """(norm of `after` / norm of `before`, cosine) of the token coefficients. None: nothing trains on one side."""
    old, new = _of_samples(before), _of_samples(after)
    dot = math.fsum(n * c * new[key][1] for key, (n, c) in old.items() if key in new)
    norms = [math.sqrt(math.fsum(n * c * c for n, c in side.values())) for side in (old, new)]
    if not norms[0]:
        return None, None
    return norms[1] / norms[0], dot / (norms[0] * norms[1]) if norms[1] else None


def _of_samples(decision: Decision) -> Mapping[tuple[str, int], tuple[int, float]]:
    """(attempt, branch) -> (sampled tokens, coefficient of each)."""
    if not decision.divisor:
        return {}
    return {(r.attempt, r.branch): (r.sampled, r.advantage * r.weight / decision.divisor) for r in decision.batch.refs}


def _valid(attempt: ev.AttemptDecision) -> bool:
    return attempt.fate in (ev.Fate.TRAINED, ev.Fate.DROPPED)


def _valid_mean(group: ev.GroupDecided) -> float:
    rewards = [a.reward for a in group.attempts if _valid(a) and a.reward is not None]
    return math.fsum(rewards) / len(rewards)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
