"""Layer parts that megatron-core has only in its CUDA libraries, made of torch's own operations: core attention, RMSNorm, experts.

They are put in by module spec, the extension point megatron has for it, and are the same on every machine but for torch's kernels. The
core attention also rotates queries and keys, by positions that the batch brings, and spreads over context-parallel ranks: each gives its
tokens of all heads for all tokens of its heads, and back. Not covered: dropout, padded batches.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from rl360.trainer.batch import PackedBatch
from rl360.trainer.experts import TorchExperts
from rl360.trainer.platform import compiled

_LONG: Final = 2048
"""Mean length from which sequences go one by one on a GPU: cuDNN's kernel is quicker than the one for varying lengths, but one a launch."""


@dataclass
class Packing(PackedSeqParams):
    """What layers have to know of a microbatch: bounds of its sequences, on the host as well, and the rotation of each token here.

    `qkv_format` stays sbhd: megatron then leaves rotation and packing to the core attention.
    """

    lengths: tuple[int, ...] = ()
    cos: Tensor | None = None  # float32 [t, 1, head_dim]
    sin: Tensor | None = None  # float32 [t, 1, head_dim]

    @staticmethod
    def of(batch: PackedBatch, head_dim: int, theta: float) -> Packing:
        cu, longest = batch.cu_seqlens, batch.max_seqlen
        frequency = theta ** (torch.arange(0, head_dim, 2, device=cu.device).float() / -head_dim)
        angle = torch.outer(batch.positions.float(), frequency)
        angle = torch.cat([angle, angle], -1).unsqueeze(1)
        return Packing(
            qkv_format="sbhd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=batch.lengths,
            cos=angle.cos(),
            sin=angle.sin(),
        )


class TorchCoreAttention(MegatronModule):
    """Causal attention inside each sequence of a packed microbatch. megatron's own module refuses packed batches."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: object,  # what later versions of megatron pass to core attentions of their own
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError("the torch core attention has no dropout")
        self.softmax_scale = softmax_scale
        self._group: Any = mpu.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: object = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """`query` [t, 1, heads, dim], `key` and `value` [t, 1, groups, dim] of this rank's tokens; returns [t, 1, heads * dim]."""
        if not isinstance(packed_seq_params, Packing) or packed_seq_params.cos is None or packed_seq_params.sin is None:
            raise ValueError("the trainer attends over packed batches only: pass packed_seq_params made by Packing.of")
        cos, sin = packed_seq_params.cos, packed_seq_params.sin
        q, k, v = _rotated(query.squeeze(1), cos, sin), _rotated(key.squeeze(1), cos, sin), value.squeeze(1)
        if self._group.size() > 1:
            q, k, v = (_AllTokens.apply(x, self._group) for x in (q, k, v))
        out = attend(q, k, v, packed_seq_params, self.softmax_scale)
        if self._group.size() > 1:
            out = _AllHeads.apply(out, self._group)
        return out.flatten(1).unsqueeze(1)


@compiled
def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


# ------------------------------------------------------------------------------------------------ all tokens, own heads


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None) -> Tensor:
    """`q` [t, heads, dim], `k` and `v` [t, groups, dim]; returns [t, heads, dim]."""
    if q.is_cuda and q.dtype == torch.bfloat16 and sum(packing.lengths) < _LONG * len(packing.lengths):
        return _varying(q, k, v, packing, scale)
    lengths = list(packing.lengths)
    # split, not slices: the gradient of a slice is a tensor of the whole batch
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return torch.cat([_attend(*part, scale) for part in parts])


def _varying(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None) -> Tensor:
    """One launch for all sequences. Groups of key heads are the kernel's own business."""
    from torch.nn.attention import varlen  # imports CUDA's kernels

    cu, longest = packing.cu_seqlens_q, packing.max_seqlen_q
    grouped = {"enable_gqa": True} if "enable_gqa" in (varlen.varlen_attn.__kwdefaults__ or {}) else {}
    return cast(Any, varlen.varlen_attn)(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(-1, 0), **grouped)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out.squeeze(0).transpose(0, 1)


# ------------------------------------------------------------------------------------------------ context parallelism


class _AllTokens(torch.autograd.Function):
    """[t / n, heads, dim] of this rank's tokens to [t, heads / n, dim] of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _heads_to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _tokens_to_heads(gradients[0], ctx.group), None


class _AllHeads(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _tokens_to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _heads_to_tokens(gradients[0], ctx.group), None


def _heads_to_tokens(x: Tensor, group: Any) -> Tensor:
    """Heads of the n-th rank go to it; what comes is in the order of ranks, which is that of tokens."""
    n = group.size()
    t, heads, dim = x.shape
    sent = x.reshape(t, n, heads // n, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.reshape(n * t, heads // n, dim)


def _tokens_to_heads(x: Tensor, group: Any) -> Tensor:
    n = group.size()
    t, heads, dim = x.shape
    sent = x.reshape(n, t // n, heads, dim).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.transpose(0, 1).reshape(t // n, n * heads, dim)


# ------------------------------------------------------------------------------------------------ norms, and the spec


class TorchRMSNorm(torch.nn.Module):
    """RMSNorm, of `groups` equal parts of the vector each by itself (see `rms_norm`).

    The tag is for sequence parallelism: megatron sums the gradients of such parameters over tensor-parallel ranks.
    """

    groups = 1

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        place = torch.device(torch.cuda.current_device())
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=place))
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _norm(self.weight.shape[0] // self.groups, self.groups, self.eps)(x, self.weight)


def rms_norm(groups: int) -> type[TorchRMSNorm]:
    """A module class, since that is what a spec names. K2-Horizon norms its hidden states in 4 groups."""
    return TorchRMSNorm if groups == 1 else type("GroupedRMSNorm", (TorchRMSNorm,), {"groups": groups})


@lru_cache
def _norm(size: int, groups: int, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Of vectors of `groups` parts of `size`. A function a size: fused kernels for a known size are quicker."""

    @compiled
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        if groups == 1:
            return F.rms_norm(x, (size,), weight, eps)
        return F.rms_norm(x.unflatten(-1, (groups, size)), (size,), eps=eps).flatten(-2) * weight

    return norm


def with_torch_parts(block: TransformerBlockSubmodules, *, norm_groups: int, qk_norm: bool) -> TransformerBlockSubmodules:
    """Put the parts into every layer of a local block spec, and return it."""
    norm = rms_norm(norm_groups)
    for layer in block.layer_specs or []:
        parts = cast(Any, layer.submodules)
        attention = parts.self_attention.submodules
        attention.core_attention = TorchCoreAttention
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        if qk_norm:
            attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
        experts = _sparse(parts.mlp)
        if experts is not None:
            experts.experts = TorchExperts
    block.layer_norm = cast(Any, norm)
    return block


def _sparse(mlp: Any) -> Any:
    """The submodules of a layer of experts; None: the layer is dense. Later versions of megatron bind them to a constructor."""
    for holder in (mlp, getattr(mlp, "keywords", None)):
        submodules = holder.get("submodules") if isinstance(holder, dict) else getattr(holder, "submodules", None)
        if submodules is not None and hasattr(submodules, "experts"):
            return submodules
    return None
