"""How far trainer and sampler disagree about a token that they score with the same weights (S23).

Numerics alone make this differ from 0; on the CPU in fp32 it stays below 1e-4. What a later version thinks of a token is
no disagreement, so only log-probs under the token's own version are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl360.trainer.batch import PackedBatch


@dataclass
class Agreement:
    """Over compared tokens: their number, |Δ log p|'s sum and maximum, and the KL's sum. Add up over microbatches and ranks.

    `kl` is of the sampler's distribution to the trainer's, by the estimate exp(d) - 1 - d ≥ 0 of each token, d its Δ log p.
    """

    tokens: float = 0.0
    total: float = 0.0
    maximum: float = 0.0
    kl: float = 0.0

    def add(self, logprobs: Tensor, batch: PackedBatch, versions: Iterable[int]) -> None:
        """Compare the targets that one of `versions` sampled; `logprobs` [T] are under the version of each."""
        wanted = torch.tensor(sorted(versions), dtype=batch.versions.dtype, device=batch.versions.device)
        compared = batch.mask & torch.isin(batch.versions, wanted)
        gap = (logprobs.detach() - batch.sampler_logprobs)[compared].double()
        if len(gap):
            self.tokens += len(gap)
            size = gap.abs()
            self.total += size.sum().item()
            self.maximum = max(self.maximum, size.max().item())
            self.kl += (gap.expm1() - gap).sum().item()

    def add_all(self, logprobs: Sequence[Tensor], batches: Sequence[PackedBatch], versions: Iterable[int]) -> None:
        """`add` for each microbatch."""
        wanted = list(versions)
        for scores, batch in zip(logprobs, batches, strict=True):
            self.add(scores, batch, wanted)

    def merge(self, other: Agreement) -> None:
        self.tokens += other.tokens
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)
        self.kl += other.kl

    @property
    def sums(self) -> dict[str, float]:
        return {"agree/tokens": self.tokens, "agree/total": self.total, "agree/kl": self.kl}

    @property
    def mean(self) -> float | None:
        """None when nothing was compared."""
        return self.total / self.tokens if self.tokens else None
