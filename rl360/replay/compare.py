"""Two decisions of one step side by side. Pure."""

from __future__ import annotations

import math

import msgspec

from rl360.bus import events as ev
from rl360.replay.decide import Decision
from rl360.replay.effects import Effects, effects


class FateChange(msgspec.Struct, frozen=True, kw_only=True):
    attempt: str
    before: str
    after: str


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Of the real gradients of both decisions, from the checkpoint that the step started from."""

    recorded_norm: float | None  # what StepTrained says
    norms: tuple[float, float]
    ratio: float | None  # after / before; None: a gradient is 0
    cosine: float | None
    checkpoint: str
    seconds: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`before` and `after` of every pair. None: nothing trains on one side."""

    step: int
    names: tuple[str, str]
    changed: dict[str, tuple[str, str]]  # rules that differ
    groups_kept: tuple[int, int]
    only: tuple[tuple[int, ...], tuple[int, ...]]  # groups that one side alone keeps
    samples: tuple[int, int]
    tokens: tuple[int, int]
    divisors: tuple[float, float]
    effects: tuple[Effects, Effects]
    fates: tuple[FateChange, ...]
    advantage_change_mean: float | None  # over attempts that both train
    advantage_change_max: float | None
    norm_ratio: float | None
    cosine: float | None
    measured: Measured | None = None


def compare(before: Decision, after: Decision, names: tuple[str, str]) -> Comparison:
    """Decisions of the same step."""
    kept = _kept(before), _kept(after)
    change = _advantage_change(before, after)
    after_effects = effects(after, before)
    return Comparison(
        step=before.batch.step,
        names=names,
        changed={n: (str(a), str(b)) for n, (a, b) in before.rules.changes(after.rules).items()},
        groups_kept=(len(kept[0]), len(kept[1])),
        only=(tuple(sorted(kept[0] - kept[1])), tuple(sorted(kept[1] - kept[0]))),
        samples=(len(before.batch.refs), len(after.batch.refs)),
        tokens=(_tokens(before), _tokens(after)),
        divisors=(before.divisor, after.divisor),
        effects=(effects(before, before), after_effects),
        fates=_fates(before, after),
        advantage_change_mean=math.fsum(change) / len(change) if change else None,
        advantage_change_max=max(map(abs, change)) if change else None,
        norm_ratio=after_effects.norm_ratio,
        cosine=after_effects.cosine,
    )


def _kept(decision: Decision) -> set[int]:
    return {g.group for g in decision.groups if g.kept}


def _tokens(decision: Decision) -> int:
    return sum(ref.sampled for ref in decision.batch.refs)


def _fates(before: Decision, after: Decision) -> tuple[FateChange, ...]:
    old, new = _by_attempt(before), _by_attempt(after)
    pairs = ((name, _fate(old[name]), _fate(new[name])) for name in old)
    return tuple(FateChange(attempt=name, before=a, after=b) for name, a, b in pairs if a != b)


def _by_attempt(decision: Decision) -> dict[str, ev.AttemptDecision]:
    return {a.attempt: a for g in decision.groups for a in g.attempts}


def _fate(attempt: ev.AttemptDecision) -> str:
    return f"{attempt.fate} ({attempt.reason})" if attempt.reason else str(attempt.fate)


def _advantage_change(before: Decision, after: Decision) -> list[float]:
    old = {a.attempt: a.advantage for _, a in before.trained if a.advantage is not None}
    return [a.advantage - old[a.attempt] for _, a in after.trained if a.advantage is not None and a.attempt in old]
