"""Weights between Hugging Face's names and layouts and megatron-core's: Qwen3 and Qwen3-MoE.

The mapping is pure: `hf_names`, `join` and `split` know names and tensors, no model. megatron keeps two kinds fused:
    linear_qkv  rows by group: the group's query heads, its key head, its value head
    linear_fc1  rows: all of gate, then all of up
Not covered: tensor, pipeline and expert parallel layouts (every rank holds whole tensors).
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

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "self_attention.linear_qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")


def hf_names(name: str) -> tuple[str, ...]:
    """HF tensors that one megatron parameter holds.

    >>> hf_names("decoder.layers.2.mlp.experts.local_experts.5.linear_fc2.weight")
    ('model.layers.2.mlp.experts.5.down_proj.weight',)
    """
    if name in _TOP:
        return (_TOP[name],)
    if in_layer := _IN_LAYER.fullmatch(name):
        layer, rest = in_layer.groups()
        prefix = f"model.layers.{layer}."
        if expert := _EXPERT.fullmatch(rest):
            parts = _LAYER[f"mlp.{expert[2]}"]
            return tuple(f"{prefix}{part.replace('mlp.', f'mlp.experts.{expert[1]}.')}" for part in parts)
        if rest in _LAYER:
            return tuple(prefix + part for part in _LAYER[rest])
    raise ModelError(f"megatron parameter {name!r} has no Hugging Face name here")


def join(name: str, parts: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    """The megatron parameter made of its HF tensors, in the order of `hf_names`."""
    if name.endswith("linear_qkv.weight"):
        q, k, v = (p.reshape(spec.groups, -1, spec.head_dim, spec.hidden) for p in parts)
        return torch.cat([q, k, v], dim=1).reshape(-1, spec.hidden)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(name: str, tensor: Tensor, spec: ModelSpec) -> tuple[Tensor, ...]:
    """The HF tensors of a megatron parameter, in the order of `hf_names`. Parts may be views."""
    if name.endswith("linear_qkv.weight"):
        queries = spec.heads // spec.groups
        by_group = tensor.view(spec.groups, queries + 2, spec.head_dim, spec.hidden)
        return tuple(part.reshape(-1, spec.hidden) for part in by_group.split([queries, 1, 1], dim=1))
    return tensor.chunk(len(hf_names(name)))


def as_megatron(parameters: Iterable[tuple[str, Tensor]], weights: Mapping[str, Tensor], spec: ModelSpec, where: str) -> dict[str, Tensor]:
    """HF weights under megatron's names. Raises ModelError when one is missing, left over or of another shape than its parameter."""
    left = set(weights)
    made: dict[str, Tensor] = {}
    for name, parameter in parameters:
        names = hf_names(name)
        if missing := [n for n in names if n not in weights]:
            raise ModelError(f"{where}: tensor {missing[0]!r} is missing")
        parts = [weights[n] for n in names]
        for n, part, held in zip(names, parts, split(name, parameter.detach(), spec), strict=True):
            if part.shape != held.shape:
                raise ModelError(f"{where}: {n} has shape {list(part.shape)}, config.json makes it {list(held.shape)}")
        made[name] = join(name, parts, spec)
        left.difference_update(names)
    if spec.tied:
        left.discard("lm_head.weight")  # some writers store the shared tensor twice
    if left:
        raise ModelError(f"{where}: tensor {min(left)!r} belongs to no part of the model that config.json describes")
    return made


def export(parameters: Iterable[tuple[str, Tensor]], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Stream (HF name, tensor). Each tensor is a copy: it doesn't change with the next optimizer step."""
    for name, parameter in parameters:
        for hf_name, part in zip(hf_names(name), split(name, parameter.detach(), spec), strict=True):
            yield hf_name, part.clone(memory_format=torch.contiguous_format)


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
