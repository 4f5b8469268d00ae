"""Baseline and advantages of one group (S19): over its valid attempts, never over a batch of several groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class AdvantageError(ValueError):
    """A value that would poison the gradient."""


@dataclass(frozen=True)
class Advantages:
    baseline: float
    values: tuple[float, ...]  # in the order of the rewards


def advantages(rewards: Sequence[float], *, std: bool = False) -> Advantages:
    """Reward minus the mean of `rewards` (one for each valid attempt of the group), over the sample deviation when `std`.

    Sums are exact (fsum), so the result does not depend on the order of the attempts.
    Raises AdvantageError for fewer than two rewards, for a value that is not finite, and for `std` without disagreement.

    >>> advantages([1.0, 0.0, 1.0, 0.0])
    Advantages(baseline=0.5, values=(0.5, -0.5, 0.5, -0.5))
    """
    n = len(rewards)
    if n < 2:
        raise AdvantageError(f"{n} valid attempt(s): a group compares at least two (S18)")
    if not all(map(math.isfinite, rewards)):
        raise AdvantageError(f"rewards {list(rewards)}: not all are finite")
    baseline = math.fsum(rewards) / n
    centred = [r - baseline for r in rewards]
    scale = math.sqrt(math.fsum(c * c for c in centred) / (n - 1)) if std else 1.0
    if scale == 0:
        raise AdvantageError("std-normalization of rewards that agree: such a group is dropped before (S18)")
    return Advantages(baseline, tuple(c / scale for c in centred))
