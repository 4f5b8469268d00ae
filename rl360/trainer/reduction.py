"""What one sampled token weighs in the loss, and what the step's sum is divided by (S20). No torch: the audit recomputes it.

The divisor is fixed once a step, over the valid kept samples and nothing else, so the loss is the same however samples
are packed, split into microbatches or spread over ranks. An attempt has one vote however many branches it has.

With sampled tokens A: 2 (branch 0) + 2 (branch 1), B: 1
    sample_mean   A's tokens weigh 1/4 each, B's 1; divisor 2 (attempts)
    token_mean    every token weighs 1; divisor 5 (tokens)
    constant c    every token weighs 1; divisor 2 c (attempts times the constant)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Reduction = Literal["sample_mean", "token_mean", "constant"]


class ReductionError(ValueError):
    """There is nothing to divide by: the step has to be skipped instead (S21)."""


class Counted(Protocol):
    """One branch of an attempt, as far as the divisor is concerned."""

    @property
    def attempt(self) -> str: ...

    @property
    def sampled(self) -> int:
        """Tokens the policy sampled (mask 1)."""
        ...


@dataclass(frozen=True)
class TokenWeights:
    """`weights[i]` is the weight of each sampled token of sample i; the step's loss is (weighted sum over tokens) / `divisor`."""

    weights: tuple[float, ...]
    divisor: float


def token_weights(samples: Sequence[Counted], reduction: Reduction, constant: float = 0.0) -> TokenWeights:
    """Weights and divisor of one step (S20). `samples` are all samples that train, of all ranks.

    >>> from collections import namedtuple
    >>> S = namedtuple("S", "attempt sampled")
    >>> token_weights([S("a", 2), S("a", 2), S("b", 1)], "sample_mean")
    TokenWeights(weights=(0.25, 0.25, 1.0), divisor=2.0)
    """
    of_attempt: dict[str, int] = {}
    for sample in samples:
        of_attempt[sample.attempt] = of_attempt.get(sample.attempt, 0) + sample.sampled
    empty = [attempt for attempt, tokens in of_attempt.items() if tokens == 0]
    if empty or not of_attempt:
        raise ReductionError(
            f"no sampled token in {', '.join(empty) or 'the step'}: an empty attempt is not valid, an empty step is skipped"
        )
    if reduction == "sample_mean":
        return TokenWeights(tuple(1.0 / of_attempt[s.attempt] for s in samples), float(len(of_attempt)))
    ones = tuple(1.0 for _ in samples)
    if reduction == "token_mean":
        return TokenWeights(ones, float(sum(of_attempt.values())))
    if constant <= 0:
        raise ReductionError('loss_reduction = "constant" needs trainer.loss_constant above 0')
    return TokenWeights(ones, constant * len(of_attempt))
