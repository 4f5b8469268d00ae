"""Sampling a token a row, and the log-prob of what was sampled: log-softmax of logits / temperature, in fp32."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Temperatures(NamedTuple):
    """Temperatures of a batch. Rows at 0 are greedy, and report the log-prob at temperature 1."""

    divide_n1: Tensor | None  # None: all rows are at 1
    greedy_n: Tensor | None  # None: no row is greedy

    @classmethod
    def of(cls, values: list[float]) -> Temperatures:
        greedy = torch.tensor([t == 0 for t in values]) if 0 in values else None
        divide = None if all(t in (0, 1) for t in values) else torch.tensor([[t or 1.0] for t in values])
        return cls(divide, greedy)


@torch.inference_mode()
def sample(logits_nv: Tensor, temperatures: Temperatures, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids [n] and their log-probs [n] from fp32 logits. The whole vocabulary is open: no top-k, no top-p.

    By inverse CDF in fp64: one random number a row, where a Gumbel draw needs one a vocabulary entry (10x dearer on a CPU).
    """
    divide, greedy = temperatures
    logp_nv = torch.log_softmax(logits_nv if divide is None else logits_nv / divide, -1)
    cdf_nv = logp_nv.exp().cumsum(-1, dtype=torch.float64)
    total_n1 = cdf_nv[:, -1:]
    target_n1 = torch.rand(len(logits_nv), 1, dtype=torch.float64, generator=generator) * total_n1
    # a target below the total always lands on a token of positive probability
    target_n1 = torch.minimum(target_n1, torch.nextafter(total_n1, torch.zeros_like(total_n1)))
    token_n = torch.searchsorted(cdf_nv, target_n1, right=True).squeeze(1).clamp_(max=logits_nv.shape[1] - 1)
    if greedy is not None:
        token_n = torch.where(greedy, logits_nv.argmax(-1), token_n)
    return token_n, logp_nv.gather(-1, token_n.unsqueeze(1)).squeeze(1)
