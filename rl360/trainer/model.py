"""The only place that builds a megatron GPTModel: this rank's stage of it, of torch modules (see attention.py)."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from rl360 import config
from rl360.trainer.attention import with_torch_parts
from rl360.trainer.layout import Layout
from rl360.trainer.spec import ModelError, ModelSpec


def transformer_config(spec: ModelSpec, trainer: config.Trainer, layout: Layout) -> TransformerConfig:
    """megatron's configuration of `spec`: no dropout, gradients summed and never divided (S20). Raises ModelError."""
    _check(spec, layout)
    dtype: torch.dtype = getattr(torch, trainer.dtype)
    gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.groups,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_hidden,
        layernorm_epsilon=spec.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not gpu,
        bias_activation_fusion=gpu,
        bias_dropout_fusion=gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # megatron asks for it with variable lengths, of dense models too
        **_parallel(spec, layout, dtype),
        **(_experts(spec) if spec.experts else {}),
        **(_RECOMPUTE if trainer.recompute == "full" else {}),
    )


_RECOMPUTE: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _parallel(spec: ModelSpec, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """Stages have equally many layers, the last one fewer where they can't."""
    uneven = (
        {}
        if spec.layers % layout.pp == 0
        else {"num_layers_in_last_pipeline_stage": spec.layers - (layout.pp - 1) * spec.stage_layers(layout.pp)}
    )
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "pipeline_dtype": dtype,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
        **uneven,
    }


def own_layers(spec: ModelSpec, layout: Layout) -> range:
    """Layers of this rank's stage."""
    size = spec.stage_layers(layout.pp)
    return range(layout.pp_rank * size, min((layout.pp_rank + 1) * size, spec.layers))


def _check(spec: ModelSpec, layout: Layout) -> None:
    """What can't be split as asked."""

    def refuse(key: str, why: str) -> None:
        raise ModelError(f"trainer.{key}: {why}")

    if spec.vocab % layout.tp:
        refuse("tp", f"{layout.tp} doesn't divide the vocabulary ({spec.vocab})")
    if spec.groups % (layout.tp * layout.cp):
        refuse("cp" if layout.cp > 1 else "tp", f"tp x cp = {layout.tp * layout.cp} doesn't divide the {spec.groups} key and value heads")
    if spec.layers <= (layout.pp - 1) * spec.stage_layers(layout.pp):
        refuse("pp", f"{spec.layers} layers leave nothing for the last of {layout.pp} stages")
    if layout.ep > 1 and (spec.experts is None or spec.experts.count % layout.ep):
        refuse("ep", f"{layout.ep} doesn't divide the {spec.experts.count if spec.experts else 0} experts")


def _experts(spec: ModelSpec) -> dict[str, Any]:
    assert spec.experts is not None
    return {
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


def build_model(spec: ModelSpec, config: TransformerConfig, layout: Layout) -> GPTModel:
    """A GPTModel whose weights are yet to be loaded. Call it inside `platform()`, after the process groups exist."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config,
        with_torch_parts(block, norm_groups=spec.norm_groups, qk_norm=spec.qk_norm),  # pyright: ignore[reportArgumentType]
        vocab_size=spec.vocab,
        max_sequence_length=spec.context,
        pre_process=layout.first_stage,
        post_process=layout.last_stage,
        position_embedding_type="none",  # the core attention rotates
        share_embeddings_and_output_weights=spec.tied,
    )
    return model.to(config.params_dtype)


class OutputRows:
    """Makes a model's output layer compute only the rows that are asked for.

    Prompt and tool rows need no logits, and logits are the largest tensor of a pass: tokens times vocabulary. Tensor-parallel ranks hold
    other tokens each, so the output layer's input is gathered here, where rows are chosen, and not in it.
    """

    def __init__(self, model: GPTModel) -> None:
        self._rows: Tensor | None = None
        output = cast(Any, model).output_layer
        self._parallel = bool(output.sequence_parallel)
        output.sequence_parallel = False
        output.allreduce_dgrad = output.allreduce_dgrad or self._parallel
        output.register_forward_pre_hook(self._select)

    def ask(self, rows: Tensor) -> None:
        """The next pass answers for `rows` (int64 indices into the packed tokens) alone, in their order."""
        self._rows = rows

    def _select(self, layer: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        if self._parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return (hidden if self._rows is None else hidden.index_select(0, self._rows), *rest)
