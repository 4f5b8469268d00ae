"""The policy that is trained: log-probs, one optimizer step, export, and the state that a checkpoint holds.

The loss, the divisor and the batch come from outside; this file knows megatron and nothing of reinforcement learning.
Every gradient is the plain sum over tokens of weighted losses, whatever the microbatches and ranks (S20): megatron is told to
divide by nothing. Call everything inside `platform()`, in one thread, after `process_groups` exist.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rl360 import config
from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from rl360.trainer import hf
from rl360.trainer.batch import PackedBatch
from rl360.trainer.loss import LossSums, Objective, add_up, policy_loss
from rl360.trainer.model import build_model, transformer_config
from rl360.trainer.spec import ModelSpec

T = TypeVar("T")


class PolicyError(RuntimeError):
    """A step that must not be kept: the weights in memory are no longer those of the last checkpoint."""


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step, over all ranks. `sums` and `maxima` are those of `LossSums`; `loss` is their sum over the divisor."""

    loss: float
    grad_norm: float  # before clipping
    sums: dict[str, float]
    maxima: dict[str, float]
    seconds: dict[str, float]  # forward_backward, optimizer


@dataclass(frozen=True)
class Scores:
    """Of the targets of a microbatch, [T]. `entropy` only when the objective asks for it."""

    logprobs: Tensor
    entropy: Tensor | None


class Policy:
    """A megatron GPTModel with its optimizer. All ranks of a data-parallel group hold the same weights."""

    def __init__(self, spec: ModelSpec, trainer: config.Trainer, temperature: float) -> None:
        self.spec = spec
        self.objective = Objective.of(trainer)
        self._temperature = temperature
        self._device = torch.device(torch.cuda.current_device())
        self._config = transformer_config(spec)
        data_parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self._model = DistributedDataParallel(self._config, data_parallel, build_model(spec, self._config))
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(  # pyright: ignore[reportAttributeAccessIssue]
            _optimizer_config(trainer), [self._model], use_gloo_process_groups=False
        )
        self._config.no_sync_func = self._model.no_sync
        self._config.grad_scale_func = self.optimizer.scale_loss
        self._config.finalize_model_grads_func = _sum_gradients
        self._forward_backward = get_forward_backward_func()

    @classmethod
    def from_hf(cls, folder: Path, trainer: config.Trainer, temperature: float) -> Policy:
        """The policy of a folder in HF layout, optimizer fresh. Raises ModelError."""
        policy = cls(ModelSpec.read(folder), trainer, temperature)
        policy.load_hf(folder)
        return policy

    def load_hf(self, folder: Path) -> None:
        """Replace the weights by those of a folder in HF layout."""
        weights = hf.HFWeights(folder)
        hf.load(self.parameters(), weights, self.spec, weights.where)

    @property
    def module(self) -> torch.nn.Module:
        """The GPTModel itself."""
        return self._model.module

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """megatron's names and the live parameters."""
        return self.module.named_parameters()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Stream (HF name, copy of the tensor)."""
        return hf.export(self.parameters(), self.spec)

    # ------------------------------------------------------------------------------------------------ forward, backward

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-prob of every target of each microbatch, float32 [T], at the sampling temperature, without gradient.

        All ranks must call it with equally many microbatches.
        """
        with torch.no_grad():
            return self._run(batches, lambda batch, scores: (scores.logprobs.sum(), scores.logprobs), backward=False)

    def step(self, batches: Sequence[PackedBatch], divisor: float, old_logprobs: Sequence[Tensor] | None = None) -> StepResult:
        """One optimizer step on the loss summed over all ranks' microbatches and divided by `divisor`.

        `old_logprobs`: of each microbatch, under the sampler's version (`keep_old_actor`); None: the sampler's own.
        Raises PolicyError when the gradient is not finite.
        """
        old = iter(old_logprobs or [None] * len(batches))

        def loss(batch: PackedBatch, scores: Scores) -> tuple[Tensor, LossSums]:
            result = policy_loss(scores.logprobs, batch, self.objective, old_logprobs=next(old), entropy=scores.entropy)
            return result.total / divisor, result

        started = time.perf_counter()
        self._model.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums, maxima = _over_ranks(*add_up(self._run(batches, loss, backward=True)))
        ready = time.perf_counter()
        _, norm, _ = cast(Any, self.optimizer).step()
        if norm is None or not math.isfinite(float(norm)):
            raise PolicyError(f"gradient norm is {norm}: the step is lost; the trainer goes on from its last checkpoint")
        seconds = {"forward_backward": ready - started, "optimizer": time.perf_counter() - ready}
        return StepResult(sums["loss"] / divisor, float(norm), sums, maxima, seconds)

    def _run(self, batches: Sequence[PackedBatch], finish: Callable[[PackedBatch, Scores], tuple[Tensor, T]], *, backward: bool) -> list[T]:
        """Send microbatches through the model; `finish` makes the loss and what is kept of each."""

        def forward(batches: Iterator[PackedBatch], model: Callable[..., Tensor]) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)
            logits = model(batch.ids[None], batch.positions[None], None, packed_seq_params=_packed(batch))
            return logits, partial(score, batch)

        def score(batch: PackedBatch, logits: Tensor) -> tuple[Tensor, Tensor, T]:
            loss, kept = finish(batch, self._scores(logits, batch))
            return loss.float(), torch.tensor(0, dtype=torch.int), kept

        return self._forward_backward(
            forward_step_func=forward,
            data_iterator=(batch.to(self._device) for batch in batches),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=1,  # real lengths are in the batches
            micro_batch_size=1,
            forward_only=not backward,
        )

    def _scores(self, logits: Tensor, batch: PackedBatch) -> Scores:
        """`logits` float32 [1, T, vocab] may be overwritten."""
        rows = logits[0].unsqueeze(1).float()
        if self._temperature != 1.0:
            rows = rows / self._temperature
        entropy = _entropy(rows.squeeze(1)) if self.objective.entropy_coef else None
        # the cross entropy overwrites what it is given, which the entropy's backward still needs
        given = rows if entropy is None else rows.clone()
        return Scores(-vocab_parallel_cross_entropy(given, batch.targets.unsqueeze(1)).squeeze(1), entropy)


def _entropy(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def _packed(batch: PackedBatch) -> PackedSeqParams:
    cu, longest = batch.cu_seqlens, batch.max_seqlen
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)


def _sum_gradients(models: list[torch.nn.Module], num_tokens: object = None, **rest: Any) -> None:
    """megatron's reduction without its division by the token count."""
    finalize_model_grads(models, None, **rest)


def _optimizer_config(trainer: config.Trainer) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=trainer.lr,
        min_lr=trainer.lr,
        weight_decay=trainer.weight_decay,
        adam_beta1=trainer.betas[0],
        adam_beta2=trainer.betas[1],
        clip_grad=trainer.clip_grad,
        params_dtype=torch.float32,
        use_distributed_optimizer=False,
    )


def _over_ranks(sums: dict[str, float], maxima: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Add sums and take maxima over the data-parallel ranks. All ranks have the same keys: they run the same objective."""
    group = parallel_state.get_data_parallel_group()
    return _reduced(sums, dist.ReduceOp.SUM, group), _reduced(maxima, dist.ReduceOp.MAX, group)


def _reduced(values: dict[str, float], op: Any, group: Any) -> dict[str, float]:
    keys = sorted(values)
    tensor = torch.tensor([values[k] for k in keys], dtype=torch.float64, device=torch.device(torch.cuda.current_device()))
    dist.all_reduce(tensor, op=op, group=group)
    return dict(zip(keys, cast(Iterable[float], tensor.tolist()), strict=True))
