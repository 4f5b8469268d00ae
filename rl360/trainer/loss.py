"""The objective (S22): PPO-clip times a truncated importance weight, a KL and an entropy term, summed with token weights (S20).

Nothing here knows the model: it takes log-probs of the targets of a `PackedBatch` and returns a sum. The caller divides by
the step's divisor (`weigh`), the same on every rank and in every microbatch.

The importance weight between trainer and sampler is counted once:
    keep_old_actor   ratio = exp(logp - old), TIS = exp(old - sampler) within [tis_floor, tis_cap]; `old` are log-probs that the
                     trainer computed with the weights of the sampler's version
    sampler          ratio = exp(logp - sampler) is itself that weight; it is only truncated to [tis_floor, tis_cap]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl360 import config
from rl360.trainer.batch import PackedBatch
from rl360.trainer.reduction import token_weights

__all__ = ["LossError", "LossSums", "Objective", "add_up", "low_var_kl", "merge_sums", "policy_loss", "token_weights"]

_LOG_LIMIT = 20.0
"""Log-ratios are held within ±20 before exp, far beyond any clip, so that no inf appears."""


class LossError(ValueError):
    """The objective asks for log-probs that were not given, or a value is not finite."""


@dataclass(frozen=True)
class Objective:
    """Coefficients of S22."""

    eps_low: float = 0.2
    eps_high: float = 0.28
    tis_cap: float = 2.0
    tis_floor: float = 0.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    @staticmethod
    def of(trainer: config.Trainer) -> Objective:
        return Objective(trainer.eps_low, trainer.eps_high, trainer.tis_cap, trainer.tis_floor, trainer.kl_coef, trainer.entropy_coef)


@dataclass(frozen=True)
class LossSums:
    """Of one microbatch. `total` (float64 scalar) carries the gradient; the rest is detached.

    `sums` add up over microbatches and ranks, `maxima` take the maximum; both are float64 scalars. `sums["tokens"]` counts
    the sampled tokens, the denominator of every mean made of the others. `sums["loss"]` equals `total`.
    """

    total: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    batch: PackedBatch,
    objective: Objective,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossSums:
    """Weighted sum of the objective over the sampled tokens of one microbatch; minimise `total / divisor`.

    `logprobs` [T] float, with gradient: of `batch.targets` under the policy being trained. `old_logprobs` [T]: under the
    sampler's version, recomputed by the trainer (`keep_old_actor`); None: the sampler's own log-probs are the old policy.
    `ref_logprobs` [T] is needed for kl_coef > 0, `entropy` [T] for entropy_coef > 0. Values in rows without a target are ignored.
    Raises LossError when one is missing or a log-prob of a sampled token is not finite.
    """
    logp = _finite(logprobs, batch, "log-prob")
    surrogate, sums = _surrogate(logp, batch, objective, old_logprobs)
    loss = -surrogate
    if objective.kl_coef:
        kl = low_var_kl(logp, _needed(ref_logprobs, batch, "ref_logprobs", "trainer.kl_coef"), batch)
        loss = loss + objective.kl_coef * kl
        sums["kl"] = _count(batch, kl.detach())
    if objective.entropy_coef or entropy is not None:
        spread = _needed(entropy, batch, "entropy", "trainer.entropy_coef")
        loss = loss - objective.entropy_coef * spread
        sums["entropy"] = _count(batch, spread.detach())
    total = (loss * batch.weights).sum(dtype=torch.float64)
    gap = _gap(logp, batch).abs()
    sums |= {"loss": total.detach(), "tokens": batch.mask.sum(dtype=torch.float64), "abs_dlogp": _count(batch, gap)}
    return LossSums(total, sums, {"max_abs_dlogp": gap.max().double()})


def _surrogate(logp: Tensor, batch: PackedBatch, objective: Objective, old_logprobs: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO-clip with the truncated importance weight, [T], and what it did to how many tokens."""
    old = batch.sampler_logprobs if old_logprobs is None else _finite(old_logprobs, batch, "old log-prob").detach()
    ratio = _exp(_where(batch, logp.detach() - old)) * (logp - logp.detach()).exp()  # held within bounds, its gradient whole
    importance = _exp(_gap(logp, batch) if old_logprobs is None else _gap(old, batch))
    tis = importance.clamp(objective.tis_floor, objective.tis_cap)
    unclipped = ratio * batch.advantages
    clipped = ratio.clamp(1 - objective.eps_low, 1 + objective.eps_high) * batch.advantages
    if old_logprobs is None:
        surrogate = torch.minimum(tis / ratio.detach() * unclipped, clipped)
    else:
        surrogate = tis * torch.minimum(unclipped, clipped)
    return surrogate, {
        "tis": _count(batch, tis),
        "tis_clipped": _count(batch, (tis != importance).float()),
        "clipped": _count(batch, (clipped < unclipped).float()),
        "ratio": _count(batch, ratio.detach()),
    }


def _gap(logp: Tensor, batch: PackedBatch) -> Tensor:
    """Trainer minus sampler log-prob of each sampled token, no gradient."""
    return _where(batch, logp.detach() - batch.sampler_logprobs)


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor, batch: PackedBatch) -> Tensor:
    """KL to the reference a token, [T] ≥ 0: exp(d) - d - 1 with d = ref - logp; 0 where nothing was sampled."""
    d = _where(batch, ref_logprobs - logprobs)
    return _exp(d) - d - 1


def merge_sums(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step from sums and maxima over all its microbatches and ranks: means over sampled tokens, with n."""
    tokens = sums["tokens"]
    if tokens <= 0:
        raise LossError("no sampled token in the step: it has to be skipped (S21)")
    means = {f"train/{k}": v / tokens for k, v in sums.items() if k not in ("tokens", "loss")}
    return {**means, "train/tokens": tokens, **{f"train/{k}": v for k, v in maxima.items()}}


def add_up(parts: Iterable[LossSums]) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima over microbatches, as plain numbers."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for k, v in part.sums.items():
            sums[k] = sums.get(k, 0.0) + v.item()
        for k, v in part.maxima.items():
            maxima[k] = max(maxima.get(k, 0.0), v.item())
    return sums, maxima


def _finite(logprobs: Tensor, batch: PackedBatch, what: str) -> Tensor:
    logp = torch.where(batch.mask, logprobs.float() if logprobs.dtype != torch.float64 else logprobs, 0.0)
    if not torch.isfinite(logp).all():
        raise LossError(f"a {what} of a sampled token is not finite")
    return logp


def _needed(value: Tensor | None, batch: PackedBatch, name: str, key: str) -> Tensor:
    if value is None:
        raise LossError(f"{key} above 0 needs {name}")
    return _finite(value, batch, name)


def _where(batch: PackedBatch, value: Tensor) -> Tensor:
    """0 in rows without a sampled target: padding has neither gradient nor metrics."""
    return torch.where(batch.mask, value, 0.0)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LOG_LIMIT, _LOG_LIMIT).exp()


def _count(batch: PackedBatch, value: Tensor) -> Tensor:
    """Sum over sampled tokens, each counted once."""
    return torch.where(batch.mask, value, 0.0).sum(dtype=torch.float64)
