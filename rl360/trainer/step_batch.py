"""All that a decided step trains on, with what each sampled token weighs (S20, S21). No torch: replays make it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rl360 import config
from rl360.bus import events as ev
from rl360.bus.blobs import digest_of
from rl360.trainer.commands import SampleRef
from rl360.trainer.groups import survivors
from rl360.trainer.outcomes import Outcomes
from rl360.trainer.reduction import token_weights


@dataclass(frozen=True)
class StepBatch:
    """No refs: the step is skipped (S21), and `why` says the reason."""

    step: int
    version: int  # of the weights that it starts from
    refs: tuple[SampleRef, ...]
    divisor: float
    versions: tuple[int, ...]  # that tokens may have
    stale: tuple[str, ...]  # samples dropped at consumption (S24)
    why: str = ""

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of each sample, as `StepTrained` lists them."""
        return tuple(ref.sample.digest or digest_of(ref.sample.inline or b"") for ref in self.refs)


def make_batch(step: int, version: int, decided: Iterable[ev.GroupDecided], outcomes: Outcomes, trainer: config.Trainer) -> StepBatch:
    """All surviving samples of a decided step (S21), too stale ones left out (S24), for weights of `version`."""
    decided = list(decided)
    oldest = version - trainer.max_staleness
    chosen = survivors(decided, outcomes)
    fresh = [s for s in chosen if s.merged.min_version >= oldest]
    stale = tuple(f"{s.merged.attempt}/{s.merged.branch}" for s in chosen if s.merged.min_version < oldest)
    if not fresh:
        return StepBatch(step, version, (), 0.0, (), stale, _why(decided, stale))
    merged = [s.merged for s in fresh]
    weights = token_weights(merged, trainer.loss_reduction, trainer.loss_constant)
    refs = tuple(_ref(s.merged, s.advantage, w) for s, w in zip(fresh, weights.weights, strict=True))
    versions = tuple(range(min(m.min_version for m in merged), max(m.max_version for m in merged) + 1))
    return StepBatch(step, version, refs, weights.divisor, versions, stale)


def _ref(merged: ev.TrajectoryMerged, advantage: float, weight: float) -> SampleRef:
    return SampleRef(
        attempt=merged.attempt,
        branch=merged.branch,
        tokens=merged.tokens,
        sampled=merged.sampled,
        advantage=advantage,
        sample=merged.sample,
        routing=merged.routing,
        weight=weight,
    )


def _why(decided: Iterable[ev.GroupDecided], stale: tuple[str, ...]) -> str:
    reasons = Counter(group.reason for group in decided if not group.kept)
    if stale:
        reasons["stale at consumption"] += len(stale)
    return "no sample survived: " + ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items()))
