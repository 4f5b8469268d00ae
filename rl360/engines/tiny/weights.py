"""The weights of a model, held fused for speed and named as Hugging Face names them.

Every named tensor is a view into fused storage, so writing a name writes what the forward reads. Values are always copied in:
the engine never shares memory with whoever sent them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl360.engines.tiny.shape import ModelError, ModelShape


class MisshapenError(ModelError):
    """A tensor of another shape than the model's."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Fused weights of one layer. `heads` = query heads then key heads (norm rows), `width` = of the MLP or of one expert."""

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]
    qk_norm: Tensor  # [heads + kv_heads, head_dim]: the query norm's row repeated, then the key norm's
    out: Tensor  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # dense [2 * width, hidden]; MoE [experts, 2, width, hidden]
    down: Tensor  # dense [hidden, width]; MoE [hidden, experts, width]
    router: Tensor | None  # MoE [experts, hidden]


class Weights:
    """All weights of one version. Once live they are never written again: a newer version is another object."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        """Storage of the right shapes; values are undefined until every name is written."""
        self.shape, self.dtype = shape, dtype
        self.named: dict[str, Tensor] = {}
        self._targets: dict[str, Tensor] = {}
        self.embed = self._own("model.embed_tokens.weight", shape.vocab, shape.hidden)
        self.layers = [self._layer(i) for i in range(shape.layers)]
        self.norm = self._own("model.norm.weight", shape.hidden)
        self.head = self.embed if shape.tied else self._own("lm_head.weight", shape.vocab, shape.hidden)

    @property
    def elements(self) -> int:
        """Numbers in all named tensors."""
        return sum(t.numel() for t in self.named.values())

    def write(self, name: str, value: Tensor) -> None:
        """Copy `value`, of the name's shape, in."""
        if value.shape != self.named[name].shape:
            raise MisshapenError(f"{name} has shape {list(value.shape)}, the model has {list(self.named[name].shape)}")
        self._targets[name].copy_(value)

    def clone(self) -> Weights:
        """A copy with its own storage."""
        copy = Weights(self.shape, self.dtype)
        for name, value in self.named.items():
            copy.write(name, value)
        return copy

    def _name(self, name: str, view: Tensor, target: Tensor | None = None) -> None:
        self.named[name] = view
        self._targets[name] = view if target is None else target

    def _own(self, name: str, *size: int) -> Tensor:
        tensor = torch.empty(size, dtype=self.dtype)
        self._name(name, tensor)
        return tensor

    def _layer(self, index: int) -> Layer:
        s, prefix = self.shape, f"model.layers.{index}."
        attn_norm = self._own(prefix + "input_layernorm.weight", s.hidden)
        qkv = torch.empty((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden, dtype=self.dtype)
        for part, rows in zip("qkv", qkv.split([h * s.head_dim for h in (s.heads, s.kv_heads, s.kv_heads)]), strict=True):
            self._name(f"{prefix}self_attn.{part}_proj.weight", rows)
        qk_norm = torch.empty(s.heads + s.kv_heads, s.head_dim, dtype=self.dtype)
        self._name(prefix + "self_attn.q_norm.weight", qk_norm[0], qk_norm[: s.heads])
        self._name(prefix + "self_attn.k_norm.weight", qk_norm[s.heads], qk_norm[s.heads :])
        out = self._own(prefix + "self_attn.o_proj.weight", s.hidden, s.heads * s.head_dim)
        mlp_norm = self._own(prefix + "post_attention_layernorm.weight", s.hidden)
        gate_up, down, router = self._experts(prefix) if index in s.moe_layers else self._dense(prefix)
        return Layer(attn_norm=attn_norm, qkv=qkv, qk_norm=qk_norm, out=out, mlp_norm=mlp_norm, gate_up=gate_up, down=down, router=router)

    def _dense(self, prefix: str) -> tuple[Tensor, Tensor, None]:
        s = self.shape
        gate_up = torch.empty(2 * s.feed_forward, s.hidden, dtype=self.dtype)
        self._name(prefix + "mlp.gate_proj.weight", gate_up[: s.feed_forward])
        self._name(prefix + "mlp.up_proj.weight", gate_up[s.feed_forward :])
        return gate_up, self._own(prefix + "mlp.down_proj.weight", s.hidden, s.feed_forward), None

    def _experts(self, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        gate_up = torch.empty(s.experts, 2, s.expert_width, s.hidden, dtype=self.dtype)
        down = torch.empty(s.hidden, s.experts, s.expert_width, dtype=self.dtype)
        for e in range(s.experts):
            self._name(f"{prefix}mlp.experts.{e}.gate_proj.weight", gate_up[e, 0])
            self._name(f"{prefix}mlp.experts.{e}.up_proj.weight", gate_up[e, 1])
            self._name(f"{prefix}mlp.experts.{e}.down_proj.weight", down[:, e])
        return gate_up, down, self._own(prefix + "mlp.gate.weight", s.experts, s.hidden)


def load_weights(folder: Path, shape: ModelShape, dtype: torch.dtype) -> Weights:
    """Read safetensors of a folder in HF layout, cast to `dtype`. Raises ModelError on a missing, extra or misshapen tensor."""
    weights = Weights(shape, dtype)
    missing = set(weights.named)
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in cast(list[str], file.keys()):
                    if name == "lm_head.weight" and shape.tied:
                        continue  # some writers store the shared tensor twice
                    if name not in weights.named:
                        raise ModelError(f"{path}: tensor {name!r} belongs to no part of the model that config.json describes")
                    weights.write(name, cast(Tensor, file.get_tensor(name)))
                    missing.discard(name)
        except MisshapenError as e:
            raise ModelError(f"{path}: {e}") from None
        except (OSError, SafetensorError) as e:
            raise ModelError(f"{path}: can't be read as safetensors: {e}") from None
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, {min(missing)!r} first")
    return weights


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        shards = cast(Mapping[str, str], json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as e:
        raise ModelError(f"{index}: not an index of safetensors shards: {e}") from None
    return sorted({folder / name for name in shards.values()})
