"""The only place that builds a megatron GPTModel: local torch modules, no fused kernels."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from rl360 import config
from rl360.trainer.attention import with_torch_parts
from rl360.trainer.spec import ModelSpec


def transformer_config(spec: ModelSpec, trainer: config.Trainer) -> TransformerConfig:
    """megatron's configuration of `spec`: fp32, no dropout, no fused kernels, gradients summed and never divided (S20)."""
    experts: dict[str, Any] = {}
    recompute: dict[str, Any] = {}
    if trainer.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if spec.experts is not None:
        experts = {
            "num_moe_experts": spec.experts.count,
            "moe_router_topk": spec.experts.topk,
            "moe_ffn_hidden_size": spec.experts.ffn_hidden,
            "moe_layer_freq": [int(sparse) for sparse in spec.experts.layers],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_router_pre_softmax": not spec.experts.normalize_topk,
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_router_fusion": False,  # it would skip routing replay without a word
        }
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.groups,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_hidden,
        layernorm_epsilon=spec.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # megatron asks for it with variable lengths, of dense models too
        **experts,
        **recompute,
    )


def build_model(spec: ModelSpec, config: TransformerConfig) -> GPTModel:
    """A GPTModel whose weights are yet to be loaded. Call it inside `platform()`, after the process groups exist."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(
        config,
        with_torch_parts(block),  # pyright: ignore[reportArgumentType]
        vocab_size=spec.vocab,
        max_sequence_length=spec.context,
        position_embedding_type="rope",
        rotary_base=cast(int, spec.rope_theta),
        share_embeddings_and_output_weights=spec.tied,
    )


class OutputRows:
    """Makes a model's output layer compute only the rows that are asked for.

    Prompt and tool rows need no logits, and logits are the largest tensor of a pass: tokens times vocabulary.
    """

    def __init__(self, model: GPTModel) -> None:
        self._rows: torch.Tensor | None = None
        model.output_layer.register_forward_pre_hook(self._select)

    def ask(self, rows: torch.Tensor) -> None:
        """The next pass answers for `rows` (int64 indices into the packed tokens) alone, in their order."""
        self._rows = rows

    def _select(self, layer: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = args
        return (hidden if self._rows is None else hidden.index_select(0, self._rows), *rest)
