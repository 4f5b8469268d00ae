"""Layer parts that megatron-core has only in its CUDA libraries: packed core attention over torch SDPA, and RMSNorm.

Both are put in by module spec, the extension point megatron has for it. Not covered: context parallelism, dropout, padded batches.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchCoreAttention(MegatronModule):
    """Causal attention inside each sequence of a packed (THD) batch. megatron's own module refuses packed batches.

    Sequences go one by one: on a CPU this is faster than padding them to one length, forward and backward.
    """

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
        if config.context_parallel_size != 1 or config.attention_dropout:
            raise ValueError("the torch core attention has no context parallelism and no dropout: use Transformer Engine for them")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: object = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """`query` [t, heads, dim], `key` and `value` [t, groups, dim]; returns [t, heads * dim]."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("the trainer attends over packed batches only: pass packed_seq_params in thd format")
        lengths: list[int] = packed_seq_params.cu_seqlens_q.diff().tolist()
        # split, not slices: the gradient of a slice is a tensor of the whole batch
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(q, k, v) for q, k, v in parts])

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        grouped = q.size(1) != k.size(1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)
        return out.squeeze(0).transpose(0, 1).reshape(query.size(0), -1)


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that knows sequence parallelism: megatron reduces the gradients of parameters with this tag."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


def with_torch_parts(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Put both parts into every layer of a local block spec, and return it."""
    for layer in block.layer_specs or []:
        parts = cast(Any, layer.submodules)
        attention = parts.self_attention.submodules
        attention.core_attention = TorchCoreAttention
        parts.input_layernorm = parts.pre_mlp_layernorm = TorchRMSNorm
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    block.layer_norm = cast(Any, TorchRMSNorm)
    return block
