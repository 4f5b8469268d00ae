"""What a step measured (S23), from its events alone: before the filter, over valid attempts, every mean with its n.

    requested = valid + masked + stale           masked includes infra
    reward/valid_mean    rewards of valid attempts, before the filter          n = samples/valid
    reward/kept_mean     rewards of valid attempts of kept groups              n = samples/kept
    infra/rate           attempts whose outcome is a typed failure             n = samples/requested

A reward is the shaped one (recipe's `[reward]`); `reward/raw_mean` is what verifiers wrote, over the same attempts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rl360.bus import events as ev
from rl360.trainer.outcomes import Terminal


@dataclass(frozen=True)
class Mean:
    """A mean that says its denominator. `value` is None for n = 0: the mean of nothing is not 0."""

    total: float
    n: int

    @staticmethod
    def over(values: Iterable[float]) -> Mean:
        listed = list(values)
        return Mean(math.fsum(listed), len(listed))

    @property
    def value(self) -> float | None:
        return self.total / self.n if self.n else None


@dataclass(frozen=True)
class StepMetrics:
    """Of one step and purpose, as far as its events go; `decided` counts groups."""

    step: int
    purpose: ev.Purpose
    requested: int
    groups: int
    decided: int
    groups_kept: int
    valid: Mean
    raw: Mean
    kept: Mean
    domains: dict[str, Mean]
    masked: int
    stale: int
    trained: int  # kept attempts, once the step is trained
    infra: dict[str, int]  # by "boundary/cause"
    dropped: dict[str, int]  # groups by reason
    unfiltered: Mean  # infra counted as 0: for comparison only
    cached_tokens: int
    best_cached: int  # what a perfect prefix cache would have held
    prompt_tokens: int
    training: dict[str, float]  # of StepTrained

    @property
    def infra_total(self) -> int:
        return sum(self.infra.values())

    def flat(self) -> dict[str, float]:
        """S23's names. The n of a mean has the mean's name and `_n`; a mean of nothing is left out."""
        evaluated = self.purpose is ev.Purpose.EVAL
        prefix = "eval" if evaluated else "reward"
        means = {f"{prefix}/valid_mean": self.valid, f"{prefix}/raw_mean": self.raw}
        means |= {f"{prefix}/valid_mean/{domain}": mean for domain, mean in sorted(self.domains.items())}
        if not evaluated:
            means |= {"reward/kept_mean": self.kept, "legacy/unfiltered_mean": self.unfiltered}
        means["infra/rate"] = Mean(self.infra_total, self.requested)
        means |= {f"infra/rate/{cause}": Mean(n, self.requested) for cause, n in sorted(self.infra.items())}
        means |= {"cache/hit": Mean(self.cached_tokens, self.prompt_tokens), "cache/best": Mean(self.best_cached, self.prompt_tokens)}
        counts = {"requested": self.requested, "valid": self.valid.n, "masked": self.masked, "stale": self.stale}
        counts |= {} if evaluated else {"kept": self.kept.n, "trained": self.trained}
        flat = {f"eval/samples/{k}" if evaluated else f"samples/{k}": float(v) for k, v in counts.items()}
        for name, mean in means.items():
            flat[f"{name}_n"] = float(mean.n)
            if mean.value is not None:
                flat[name] = mean.value
        return flat | ({} if evaluated else self.training)


@dataclass
class StepTally:
    """Fold of one step's events of one purpose; events of other steps and purposes must not be given."""

    opened: ev.StepOpened
    _first: dict[str, Terminal] = field(default_factory=dict[str, Terminal])
    _merged: dict[tuple[str, int], ev.TrajectoryMerged] = field(default_factory=dict[tuple[str, int], ev.TrajectoryMerged])
    _decided: dict[int, ev.GroupDecided] = field(default_factory=dict[int, ev.GroupDecided])
    _trained: ev.StepTrained | None = None

    def add(self, event: ev.Event) -> None:
        """Fold one event, in journal order; folding it again changes nothing."""
        if isinstance(event, ev.VerifierResult | ev.InfraFailed):
            self._first.setdefault(event.attempt, event)
        elif isinstance(event, ev.TrajectoryMerged):
            self._merged.setdefault((event.session, event.branch), event)
        elif isinstance(event, ev.GroupDecided):
            self._decided.setdefault(event.group, event)
        elif isinstance(event, ev.StepTrained):
            self._trained = self._trained or event

    @property
    def complete(self) -> bool:
        """All groups are decided."""
        return len(self._decided) == len(self.opened.groups)

    def metrics(self) -> StepMetrics:
        attempts = [(g, a) for g in self._decided.values() for a in g.attempts]
        valid = [(g, a) for g, a in attempts if a.fate in (ev.Fate.TRAINED, ev.Fate.DROPPED)]
        kept = Mean.over(a.reward for g, a in valid if g.kept and a.reward is not None)
        infra = [t for t in self._first.values() if isinstance(t, ev.InfraFailed)]
        merged = self._merged.values()
        return StepMetrics(
            step=self.opened.step,
            purpose=self.opened.purpose,
            requested=sum(g.attempts for g in self.opened.groups),
            groups=len(self.opened.groups),
            decided=len(self._decided),
            groups_kept=sum(g.kept for g in self._decided.values()),
            valid=Mean.over(a.reward for _, a in valid if a.reward is not None),
            raw=Mean.over(a.raw_reward for _, a in valid if a.raw_reward is not None),
            kept=kept,
            domains={d: _domain_mean(valid, d) for d in sorted({g.domain for g in self.opened.groups})},
            masked=sum(a.fate is ev.Fate.MASKED for _, a in attempts),
            stale=sum(a.fate is ev.Fate.STALE for _, a in attempts),
            trained=kept.n if self._trained is not None and not self._trained.skipped else 0,
            infra=dict(sorted(Counter(f"{t.boundary}/{t.cause}" for t in infra).items())),
            dropped=dict(sorted(Counter(g.reason for g in self._decided.values() if not g.kept).items())),
            unfiltered=Mean.over(a.reward or 0.0 for _, a in attempts),
            cached_tokens=sum(m.cached_tokens for m in merged),
            best_cached=sum(m.best_cached for m in merged),
            prompt_tokens=sum(m.prompt_tokens for m in merged),
            training={} if self._trained is None else dict(self._trained.metrics),
        )

    def closed(self, *, skipped: bool = False, why: str = "") -> ev.StepClosed:
        """The event that closes the step."""
        m = self.metrics()
        return ev.StepClosed(
            run=self.opened.run,
            step=self.opened.step,
            requested=m.requested,
            valid=m.valid.n,
            masked=m.masked,
            infra=m.infra_total,
            kept=m.kept.n,
            skipped=skipped,
            why=why,
            purpose=m.purpose,
        )


def _domain_mean(valid: list[tuple[ev.GroupDecided, ev.AttemptDecision]], domain: str) -> Mean:
    return Mean.over(a.reward for g, a in valid if g.domain == domain and a.reward is not None)


def belongs(event: ev.Event) -> ev.Purpose:
    """Purpose of the step that an event about an attempt, a group or a step belongs to.

    Attempts of evaluation are named with an "e"; events without purpose and attempt are about training.
    """
    purpose = getattr(event, "purpose", None)
    if isinstance(purpose, ev.Purpose):
        return purpose
    return ev.Purpose.EVAL if str(getattr(event, "attempt", "")).startswith("e") else ev.Purpose.TRAIN


def step_metrics(events: Iterable[ev.Event], step: int, purpose: ev.Purpose = ev.Purpose.TRAIN) -> StepMetrics:
    """Metrics of one step from events in journal order. Raises ValueError when the step was never opened."""
    tally: StepTally | None = None
    for event in events:
        if event.step != step or belongs(event) is not purpose:
            continue
        if isinstance(event, ev.StepOpened):
            tally = tally or StepTally(event)
        elif tally is not None:
            tally.add(event)
    if tally is None:
        raise ValueError(f"step {step} ({purpose}) was never opened")
    return tally.metrics()
