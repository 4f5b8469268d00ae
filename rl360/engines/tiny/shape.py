"""What `config.json` says of a Qwen3 or Qwen3-MoE model, checked: anything the forward doesn't know is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class ModelError(Exception):
    """A model folder that can't be served: the message names the file, the reason and the remedy."""


class _Rope(msgspec.Struct, frozen=True, kw_only=True):
    rope_theta: float = 10000.0
    rope_type: str = "default"


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of config.json that matter here, under their own names."""

    model_type: Literal["qwen3", "qwen3_moe"]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    max_position_embeddings: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: dict[str, object] | None = None
    eos_token_id: int | list[int] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: int = 1
    attention_bias: bool = False
    use_sliding_window: bool = False
    hidden_act: str = "silu"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model. `moe_layers` are the indices of the layers with experts; others are dense."""

    model_type: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    context: int  # positions that the model knows
    norm_eps: float
    tied: bool
    rope_theta: float
    stop_ids: frozenset[int]
    experts: int
    topk: int
    expert_width: int
    norm_topk: bool
    moe_layers: tuple[int, ...]


def read_shape(folder: Path) -> ModelShape:
    """Shape of the model in `folder`. Raises ModelError when config.json is unreadable or asks for what is not covered."""
    path = folder / "config.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as e:
        raise ModelError(f"{path}: can't be read ({e.strerror}): give a folder in Hugging Face layout") from None
    except msgspec.MsgspecError as e:
        raise ModelError(f"{path}: {e}: the tiny engine serves qwen3 and qwen3_moe") from None
    if why := _not_covered(file):
        raise ModelError(f"{path}: {why}")
    return _shape(file)


def _not_covered(c: _File) -> str:
    rope = c.rope_parameters or _Rope()
    if c.attention_bias:
        return "attention_bias is not covered"
    if c.use_sliding_window:
        return "use_sliding_window is not covered"
    if c.hidden_act != "silu":
        return f"hidden_act {c.hidden_act!r} is not covered: only silu"
    if rope.rope_type != "default" or c.rope_scaling:
        return "rope scaling is not covered: only the default rotation"
    if c.num_attention_heads % c.num_key_value_heads:
        return "num_attention_heads must be a multiple of num_key_value_heads"
    if c.model_type == "qwen3_moe" and not 0 < c.num_experts_per_tok <= _experts(c):
        return f"num_experts_per_tok must lie in [1, {_experts(c)}]"
    return ""


def _experts(c: _File) -> int:
    return c.num_experts or c.num_local_experts or 0


def _shape(c: _File) -> ModelShape:
    moe = c.model_type == "qwen3_moe"
    dense = set(c.mlp_only_layers or ())
    eos = c.eos_token_id
    return ModelShape(
        model_type=c.model_type,
        vocab=c.vocab_size,
        hidden=c.hidden_size,
        layers=c.num_hidden_layers,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim or c.hidden_size // c.num_attention_heads,
        feed_forward=c.intermediate_size,
        context=c.max_position_embeddings,
        norm_eps=c.rms_norm_eps,
        tied=c.tie_word_embeddings,
        rope_theta=c.rope_parameters.rope_theta if c.rope_parameters else c.rope_theta or 10000.0,
        stop_ids=frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos),
        experts=_experts(c) if moe else 0,
        topk=c.num_experts_per_tok if moe else 0,
        expert_width=c.moe_intermediate_size,
        norm_topk=c.norm_topk_prob,
        moe_layers=tuple(i for i in range(c.num_hidden_layers) if moe and i not in dense and (i + 1) % c.decoder_sparse_step == 0),
    )
