"""Weights between Hugging Face's names and layouts and megatron-core's: Qwen3, Qwen3-MoE and K2-Horizon.

The mapping is pure: `hf_names`, `join` and `split` know whole tensors and their names, no model. megatron keeps three kinds fused:
    linear_qkv       rows by group: the group's query heads, its key head, its value head
    linear_fc1       rows: all of gate, then all of up
    experts.weight1  [experts, rows as linear_fc1, hidden]; experts.weight2 [experts, hidden, width]
What a rank holds of a whole tensor is in `shards.py`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl360.trainer.spec import ModelError, ModelSpec

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_TOP = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_ATTENTION = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "self_attention.linear_qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
}
_QK_NORM = {
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
_DENSE = {
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_SPARSE = {
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.experts.weight1": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.experts.weight2": ("mlp.experts.{}.down_proj.weight",),
}
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)", re.ASCII)
_LAYER = _ATTENTION | _QK_NORM | _DENSE | _SPARSE


def names(spec: ModelSpec) -> Iterator[str]:
    """megatron's names of all parameters of a model, in a fixed order."""
    yield EMBEDDING
    for i in range(spec.layers):
        sparse = spec.experts is not None and spec.experts.layers[i]
        parts = _ATTENTION | (_QK_NORM if spec.qk_norm else {}) | (_SPARSE if sparse else _DENSE)
        yield from (f"decoder.layers.{i}.{rest}" for rest in parts)
    yield "decoder.final_layernorm.weight"
    if not spec.tied:
        yield OUTPUT


def shape(name: str, spec: ModelSpec) -> tuple[int, ...]:
    """Of a whole parameter."""
    experts = spec.experts
    if name in (EMBEDDING, OUTPUT):
        return (spec.vocab, spec.hidden)
    match name.rpartition("decoder.layers.")[2].partition(".")[2] or name:
        case "self_attention.linear_qkv.weight":
            return ((spec.heads + 2 * spec.groups) * spec.head_dim, spec.hidden)
        case "self_attention.linear_proj.weight":
            return (spec.hidden, spec.heads * spec.head_dim)
        case "self_attention.q_layernorm.weight" | "self_attention.k_layernorm.weight":
            return (spec.head_dim,)
        case "mlp.linear_fc1.weight":
            return (2 * spec.ffn_hidden, spec.hidden)
        case "mlp.linear_fc2.weight":
            return (spec.hidden, spec.ffn_hidden)
        case "mlp.router.weight" if experts:
            return (experts.count, spec.hidden)
        case "mlp.experts.weight1" if experts:
            return (experts.count, 2 * experts.ffn_hidden, spec.hidden)
        case "mlp.experts.weight2" if experts:
            return (experts.count, spec.hidden, experts.ffn_hidden)
        case _:
            return (spec.hidden,)


def hf_names(name: str, experts: range = range(0)) -> tuple[str, ...]:
    """HF tensors that one megatron parameter holds; of expert weights, those of `experts`.

    >>> hf_names("decoder.layers.2.mlp.experts.weight2", range(5, 7))
    ('model.layers.2.mlp.experts.5.down_proj.weight', 'model.layers.2.mlp.experts.6.down_proj.weight')
    """
    if name in _TOP:
        return (_TOP[name],)
    in_layer = _IN_LAYER.fullmatch(name)
    if in_layer is None or in_layer[2] not in _LAYER:
        raise ModelError(f"megatron parameter {name!r} has no Hugging Face name here")
    parts = tuple(f"model.layers.{in_layer[1]}.{part}" for part in _LAYER[in_layer[2]])
    return tuple(part.format(e) for e in experts for part in parts) if of_experts(name) else parts


def layer_of(name: str) -> int | None:
    """The layer that a parameter is in; None: in none."""
    in_layer = _IN_LAYER.fullmatch(name)
    return None if in_layer is None else int(in_layer[1])


def of_experts(name: str) -> bool:
    """Whether a parameter has an expert's weights in each row."""
    return ".mlp.experts." in name


def join(name: str, parts: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    """The megatron parameter made of its HF tensors, in the order of `hf_names`."""
    if name.endswith("linear_qkv.weight"):
        q, k, v = (p.reshape(spec.groups, -1, spec.head_dim, spec.hidden) for p in parts)
        return torch.cat([q, k, v], dim=1).reshape(-1, spec.hidden)
    if of_experts(name):
        each = 2 if name.endswith("weight1") else 1
        return torch.stack([torch.cat(list(parts[i : i + each])) for i in range(0, len(parts), each)])
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(name: str, tensor: Tensor, spec: ModelSpec) -> tuple[Tensor, ...]:
    """The HF tensors of a megatron parameter, in the order of `hf_names`. Parts may be views."""
    if name.endswith("linear_qkv.weight"):
        queries = spec.heads // spec.groups
        by_group = tensor.view(spec.groups, queries + 2, spec.head_dim, spec.hidden)
        return tuple(part.reshape(-1, spec.hidden) for part in by_group.split([queries, 1, 1], dim=1))
    if of_experts(name):
        return tuple(part for expert in tensor for part in expert.chunk(2 if name.endswith("weight1") else 1))
    return tensor.chunk(2) if name.endswith("linear_fc1.weight") else (tensor,)


def check_names(weights: Iterable[str], spec: ModelSpec, where: str) -> None:
    """Raises ModelError when a tensor is missing, or belongs to nothing."""
    every = range(spec.experts.count) if spec.experts else range(0)
    wanted = [hf_name for name in names(spec) for hf_name in hf_names(name, every)]
    held = set(weights)
    if missing := next((name for name in wanted if name not in held), None):
        raise ModelError(f"{where}: tensor {missing!r} is missing")
    left = held.difference(wanted)
    if spec.tied:
        left.discard("lm_head.weight")  # some writers store the shared tensor twice
    if left:
        raise ModelError(f"{where}: tensor {min(left)!r} belongs to no part of the model that config.json describes")


def whole(name: str, weights: Mapping[str, Tensor], spec: ModelSpec, where: str, experts: range = range(0)) -> Tensor:
    """A parameter made of HF weights; of expert weights, those of `experts`. Raises ModelError when a shape is wrong."""
    hf = hf_names(name, experts)
    parts = [weights[n] for n in hf]
    like = torch.empty((len(experts), *shape(name, spec)[1:]) if of_experts(name) else shape(name, spec), device="meta")
    for n, part, due in zip(hf, parts, split(name, like, spec), strict=True):
        if part.shape != due.shape:
            raise ModelError(f"{where}: {n} has shape {list(part.shape)}, config.json makes it {list(due.shape)}")
    return join(name, parts, spec)


class HFWeights(Mapping[str, Tensor]):
    """Tensors of a folder in HF layout (`model.safetensors`, or shards with their index), each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._open: dict[str, Callable[[str], Tensor]] = {}
        for path in _weight_files(folder):
            try:
                shard = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as e:
                raise ModelError(f"{path}: can't be read as safetensors: {e}") from None
            self._open |= dict.fromkeys(shard.keys(), shard.get_tensor)

    def __getitem__(self, name: str) -> Tensor:
        return self._open[name](name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as e:
        raise ModelError(f"{index}: not an index of safetensors shards: {e}") from None
    return sorted({folder / name for name in shards.values()})
