"""The rules that RL360 replaces, as pure functions: for comparison in tests and in `what-if` replays, never in a run.

They let failed attempts in: as samples of reward 0 in the baseline and the logged mean, as samples of weight 0 in the divisor.
`rewards` holds None for a masked attempt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def whole_batch_baseline(rewards: Sequence[float | None]) -> float:
    """Mean over all kept samples of a step, masked ones as 0 (S19 forbids it)."""
    return math.fsum(r or 0.0 for r in rewards) / len(rewards)


def whole_batch_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    baseline = whole_batch_baseline(rewards)
    return [None if r is None else r - baseline for r in rewards]


def sample_mean_divisor(rewards: Sequence[float | None]) -> int:
    """Masked samples count in the denominator at zero (S20 forbids it)."""
    return len(rewards)


def gradient_scale(rewards: Sequence[float | None]) -> float:
    """What that divisor does to every gradient, against one over valid samples."""
    return sum(r is not None for r in rewards) / sample_mean_divisor(rewards)


def logged_mean(values: Sequence[float], masked: int) -> float:
    """A metric averaged over samples with that denominator, such as `train/tis`."""
    return math.fsum(values) / (len(values) + masked)


def unfiltered_mean(rewards: Sequence[float | None]) -> float:
    """Mean reward before the filter, failures as wrong answers (S23 keeps it for comparison only)."""
    return whole_batch_baseline(rewards)
