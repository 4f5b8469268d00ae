"""Log-prob and entropy of targets from logits, whose vocabulary may be split over tensor-parallel ranks.

Logits are the largest tensor of a pass: tokens times vocabulary. They are kept once, in the model's dtype; everything else is made of
blocks of rows in fp32, and the backward overwrites them by their gradient. megatron's cross entropy keeps and overwrites an fp32 copy.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rl360.trainer.platform import compiled

_BLOCK: Final = 1024
"""Rows in work at once."""


def token_scores(logits: Tensor, targets: Tensor, temperature: float, *, group: Any, index: int) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy in nats, float32 [rows], at `temperature`.

    `logits` [rows, vocabulary part] are used up: their memory becomes their gradient's. `group`: of ranks that hold the other parts,
    this one's is number `index`.
    """
    logprobs, entropy = cast(Any, _TokenScores).apply(logits, targets, temperature, group, index)
    return logprobs, entropy


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, group: Any, index: int) -> tuple[Tensor, Tensor]:
        rows, part = logits.shape
        own = targets - index * part  # columns here; elsewhere for other parts
        top = logits.amax(-1).float() / temperature
        if group.size() > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        sums = torch.empty(3, rows, dtype=torch.float32, device=logits.device)  # exp, exp times logit, the target's logit
        for at in range(0, rows, _BLOCK):
            block = slice(at, at + _BLOCK)
            sums[:, block] = _block_sums(logits[block], own[block], top[block], temperature)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        total, moment, target = sums
        log_total = total.log()
        entropy = log_total - moment / total
        ctx.save_for_backward(logits, own, top + log_total, entropy)
        ctx.temperature = temperature
        return target - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        of_logprob, of_entropy = gradients
        logits, own, normalizer, entropy = ctx.saved_tensors
        for at in range(0, len(logits), _BLOCK):
            block = slice(at, at + _BLOCK)
            _block_gradient(
                logits[block], own[block], normalizer[block], entropy[block], of_logprob[block], of_entropy[block], ctx.temperature
            )
        return logits, None, None, None, None


@compiled
def _block_sums(logits: Tensor, own: Tensor, top: Tensor, temperature: float) -> Tensor:
    """[3, rows] of a block; `own` outside of the columns counts nothing."""
    shifted = logits.float() / temperature - top.unsqueeze(-1)
    weights = shifted.exp()
    here = (own >= 0) & (own < logits.shape[-1])
    column = own.clamp(0, logits.shape[-1] - 1)
    target = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    return torch.stack([weights.sum(-1), (weights * shifted).sum(-1), torch.where(here, target, 0.0)])


@compiled
def _block_gradient(
    logits: Tensor, own: Tensor, normalizer: Tensor, entropy: Tensor, of_logprob: Tensor, of_entropy: Tensor, temperature: float
) -> None:
    """Overwrite a block of logits by its gradient."""
    logp = logits.float() / temperature - normalizer.unsqueeze(-1)
    p = logp.exp()
    hit = torch.arange(logits.shape[-1], device=logits.device) == own.unsqueeze(-1)
    gradient = (hit.float() - p) * of_logprob.unsqueeze(-1) - p * (logp + entropy.unsqueeze(-1)) * of_entropy.unsqueeze(-1)
    logits.copy_(gradient / temperature)
