"""The policy that is trained: log-probs, one optimizer step, export, and the state that a checkpoint holds.

The loss, the divisor and the batch come from outside; this file knows megatron and nothing of reinforcement learning.
Every gradient is the plain sum over tokens of weighted losses, whatever the microbatches and ranks (S20): megatron is told to
divide by nothing. Call everything inside `platform()`, in one thread, after `process_groups` exist.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rl360 import config
from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from rl360.trainer import dist_state, hf
from rl360.trainer.agreement import Agreement
from rl360.trainer.attention import Packing
from rl360.trainer.batch import PackedBatch
from rl360.trainer.layout import Layout
from rl360.trainer.loss import LossSums, Objective, add_up, policy_loss
from rl360.trainer.model import OutputRows, build_model, transformer_config
from rl360.trainer.replay_router import Choices, RouterReplay
from rl360.trainer.scores import token_scores
from rl360.trainer.shards import Shards
from rl360.trainer.spec import ModelError, ModelSpec

T = TypeVar("T")


class PolicyError(RuntimeError):
    """A step that must not be kept: the weights in memory are no longer those of the last checkpoint."""


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step: the gradient of all ranks, the rest of this rank's microbatches alone. See `LossSums` for sums and maxima.

    Sums, maxima and agreement are empty but on ranks whose scores count (`Layout.scores`).
    """

    grad_norm: float  # before clipping
    sums: dict[str, float]
    maxima: dict[str, float]
    agreement: Agreement  # over tokens that the version being trained sampled
    choices: Choices  # of the routers, when experts are replayed
    seconds: dict[str, float]  # forward_backward, optimizer


@dataclass(frozen=True)
class Scores:
    """Of the sampled targets of a microbatch, [T], 0 in other rows. `entropy` has a gradient when the objective asks for it."""

    logprobs: Tensor
    entropy: Tensor


class Policy:
    """A megatron GPTModel, or this rank's part of it, with its optimizer. Every call is made on all ranks alike."""

    def __init__(self, spec: ModelSpec, trainer: config.Trainer, temperature: float) -> None:
        self.spec = spec
        self.objective = Objective.of(trainer)
        self._temperature = temperature
        self._device = torch.device(torch.cuda.current_device())
        self.layout = Layout.here()
        self._config = transformer_config(spec, trainer, self.layout)
        data_parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=trainer.distributed_optimizer)
        model = build_model(spec, self._config, self.layout).to(self._device)  # megatron leaves a router where torch made it
        self._output_rows = OutputRows(model) if self.layout.last_stage else None
        self._shards = Shards(model, self._config, spec, self.layout)
        if trainer.routing_replay and spec.experts is None:
            raise ModelError("the policy has no experts to replay: set trainer.routing_replay = false")
        self._replay = RouterReplay(model, self.layout, recomputed=trainer.recompute == "full") if trainer.routing_replay else None
        self._model = DistributedDataParallel(self._config, data_parallel, model)
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(  # pyright: ignore[reportAttributeAccessIssue]
            _optimizer_config(trainer), [self._model], use_gloo_process_groups=False
        )
        _fuse(self.optimizer)
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
        own = dict(self.parameters())
        with torch.no_grad():
            for name, weight in self.hf_weights(folder):
                own[name].copy_(weight)
        self.optimizer.reload_model_params()

    def hf_weights(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of a folder in HF layout, by `parameters`' names. Raises ModelError."""
        return self._shards.take(hf.HFWeights(folder), str(folder))

    @property
    def module(self) -> torch.nn.Module:
        """The GPTModel itself."""
        return self._model.module

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """megatron's names and the live parameters."""
        return self.module.named_parameters()

    def export(self, weights: Mapping[str, Tensor] | None = None, *, apart: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Stream (HF name, copy of the tensor) on rank 0, nothing on others; of other `weights` by `parameters`' names when given.

        `apart`: experts aren't gathered, each comes on the lowest rank that holds it.
        """
        return self._shards.export(dict(self.parameters()) if weights is None else weights, apart=apart)

    # ------------------------------------------------------------------------------------------------ forward, backward

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-prob of the sampled targets of each microbatch, float32 [T], at the sampling temperature, without gradient.

        All ranks must call it with equally many microbatches. 0 on all stages but the last.
        """
        with torch.no_grad():
            found = self._run(batches, lambda batch, scores: (scores.logprobs.sum(), scores.logprobs), backward=False)
        return found if self.layout.last_stage else [torch.zeros_like(batch.sampler_logprobs) for batch in batches]

    def step(
        self,
        batches: Sequence[PackedBatch],
        divisor: float,
        *,
        version: int,
        old_logprobs: Sequence[Tensor] | None = None,
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> StepResult:
        """One optimizer step on the loss summed over all ranks' microbatches and divided by `divisor`.

        `version`: of the weights that the step starts from. `old_logprobs`, `ref_logprobs`: of each microbatch, see `policy_loss`.
        Raises PolicyError when the gradient is not finite.
        """
        agreement = Agreement()
        started = time.perf_counter()
        sums, maxima = self._accumulate(batches, divisor, agreement, version, old_logprobs, ref_logprobs)
        ready = time.perf_counter()
        _, norm, _ = cast(Any, self.optimizer).step()
        if norm is None or not math.isfinite(float(norm)):
            raise PolicyError(f"gradient norm is {norm}: the step is lost; the trainer goes on from its last checkpoint")
        seconds = {"forward_backward": ready - started, "optimizer": time.perf_counter() - ready}
        choices = Choices() if self._replay is None else self._replay.take_choices()
        return StepResult(float(norm), sums, maxima, agreement, choices, seconds)

    def gradient(
        self,
        batches: Sequence[PackedBatch],
        divisor: float,
        *,
        version: int,
        old_logprobs: Sequence[Tensor] | None = None,
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The gradient that `step` would clip and apply, float32 [parameters of this rank] on the CPU. Weights stay as they are."""
        self._accumulate(batches, divisor, Agreement(), version, old_logprobs, ref_logprobs)
        flat = [cast(Tensor, cast(Any, p).main_grad).detach().flatten().to("cpu", torch.float32) for _, p in self.parameters()]
        return torch.cat(flat)

    def _accumulate(
        self,
        batches: Sequence[PackedBatch],
        divisor: float,
        agreement: Agreement,
        version: int,
        old_logprobs: Sequence[Tensor] | None,
        ref_logprobs: Sequence[Tensor] | None,
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Leave the summed gradient in the buffers; returns sums and maxima of this rank's microbatches."""
        nothing = [None] * len(batches)
        given = iter(zip(old_logprobs or nothing, ref_logprobs or nothing, strict=True))

        def loss(batch: PackedBatch, scores: Scores) -> tuple[Tensor, LossSums]:
            old, ref = next(given)
            agreement.add(scores.logprobs, batch, [version])
            result = policy_loss(scores.logprobs, batch, self.objective, old_logprobs=old, ref_logprobs=ref, entropy=scores.entropy)
            return result.total / divisor, result

        self._model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return add_up(self._run(batches, loss, backward=True))

    def _run(self, batches: Sequence[PackedBatch], finish: Callable[[PackedBatch, Scores], tuple[Tensor, T]], *, backward: bool) -> list[T]:
        """Send microbatches through the model; `finish` makes the loss and what is kept of each."""

        def forward(batches: Iterator[PackedBatch], model: Callable[..., Tensor]) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)
            rows = _rows_with_target(batch)
            if self._output_rows is not None:
                self._output_rows.ask(rows)
            packing = Packing.of(batch, self.spec.head_dim, self.spec.rope_theta)
            with nullcontext() if self._replay is None else self._replay.forward(batch):
                logits = model(batch.ids[None], batch.positions[None], None, packed_seq_params=packing)
            return logits, partial(score, batch, rows)

        def score(batch: PackedBatch, rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, T]:
            loss, kept = finish(batch, self._scores(logits[0], batch, rows))
            return loss.float(), torch.tensor(0, dtype=torch.int), kept

        try:
            return self._forward_backward(
                forward_step_func=forward,
                data_iterator=(batch.to(self._device) for batch in batches),
                model=[self._model],
                num_microbatches=len(batches),
                seq_length=self.layout.tp,  # real lengths are in the batches
                micro_batch_size=1,
                forward_only=not backward,
            )
        finally:
            if self._replay is not None:
                self._replay.forget()

    def _scores(self, logits: Tensor, batch: PackedBatch, rows: Tensor) -> Scores:
        """Of `logits` [rows, vocabulary part], at the sampling temperature."""
        group = mpu.get_tensor_model_parallel_group()
        logprobs, entropy = token_scores(logits, batch.targets[rows], self._temperature, group=group, index=self.layout.tp_rank)
        if self.objective.entropy_coef == 0:
            entropy = entropy.detach()
        return Scores(_spread(logprobs, rows, batch), _spread(entropy, rows, batch))


def _rows_with_target(batch: PackedBatch) -> Tensor:
    """Rows whose next token was sampled; one row where there is none, since a pass needs one."""
    rows = batch.mask.nonzero().squeeze(1)
    return rows if len(rows) else rows.new_zeros(1)


def _spread(values: Tensor, rows: Tensor, batch: PackedBatch) -> Tensor:
    """Values of some rows as [T], 0 elsewhere."""
    return values.new_zeros(len(batch.ids)).index_copy(0, rows, values)


def _fuse(optimizer: MegatronOptimizer) -> None:
    """One kernel for all of Adam on a GPU, where torch's default makes copies of all parameters."""
    for part in dist_state.adams(optimizer) if torch.cuda.is_available() else ():
        for group in part.param_groups:
            group["fused"], group["foreach"] = True, False


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
        bf16=trainer.dtype == "bfloat16",
        params_dtype=getattr(torch, trainer.dtype),
        use_distributed_optimizer=trainer.distributed_optimizer,
    )
