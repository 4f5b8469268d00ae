"""The policy's shape, read from a Hugging Face config.json. Known shapes: Qwen3, Qwen3-MoE and K2-Horizon.

Anything of a config that this trainer would silently compute otherwise is refused. K2-Horizon is read by what is public of it (grouped
RMSNorm, its sizes, first layers dense): its keys `rms_norm_groups` and `use_qk_norm` are this project's names, never tried on its weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rl360.errors import InputError
from rl360.sessions.routing import RoutingShape


class ModelError(InputError, ValueError):
    """A policy folder whose model can't be trained here: the message names the file and the key."""


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts part of a model; `layers[i]` says whether layer i has experts."""

    count: int
    topk: int
    ffn_hidden: int
    normalize_topk: bool
    layers: tuple[bool, ...]

    @property
    def routing(self) -> RoutingShape:
        """Shape of the expert choices that an engine records of this model (S10)."""
        return RoutingShape(layers=sum(self.layers), topk=self.topk, experts=self.count)


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a Qwen3-like decoder. Sizes are in elements, `context` in tokens."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    groups: int  # of key and value heads
    head_dim: int
    ffn_hidden: int
    norm_eps: float
    rope_theta: float
    context: int
    tied: bool  # output layer shares the embedding
    experts: Experts | None = None
    qk_norm: bool = True  # queries and keys are normed, a head at a time
    norm_groups: int = 1  # parts of the hidden state that are normed each by itself

    def stage_layers(self, stages: int) -> int:
        """Layers of a pipeline stage; the last one has what is left."""
        return -(-self.layers // stages)

    @staticmethod
    def read(folder: Path) -> ModelSpec:
        """Read `config.json` of a folder in HF layout. Raises ModelError."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text())
        except OSError as e:
            raise ModelError(f"{path}: can't be read ({e.strerror}); a policy is a folder in Hugging Face layout") from None
        except ValueError as e:
            raise ModelError(f"{path}: not JSON: {e}") from None
        if not isinstance(config, dict):
            raise ModelError(f"{path}: must be a JSON object")
        return from_hf_config(cast(dict[str, Any], config), str(path))


_FIXED: dict[str, tuple[object, ...]] = {
    "model_type": ("qwen3", "qwen3_moe", "k2_horizon"),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
}
"""Keys that must have one of these values, since the trainer computes nothing else."""


def from_hf_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Shape of a parsed config.json; `where` names it in errors."""
    for key, allowed in _FIXED.items():
        if config.get(key) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise ModelError(f"{where}: {key} = {config.get(key)!r}: the trainer knows {wanted} only")
    rope: dict[str, Any] = config.get("rope_parameters") or {}  # transformers 5; before it, rope_theta stood at the top
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"{where}: rope_parameters.rope_type = {rope['rope_type']!r}: the trainer knows 'default' only")
    try:
        return ModelSpec(
            vocab=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            groups=int(config["num_key_value_heads"]),
            head_dim=int(config["head_dim"]),
            ffn_hidden=int(config["intermediate_size"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
            context=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=_experts(config) if _sparse(config) else None,
            qk_norm=bool(config.get("use_qk_norm", config["model_type"] != "k2_horizon")),
            norm_groups=_norm_groups(config),
        )
    except KeyError as e:
        raise ModelError(f"{where}: key {e.args[0]!r} is missing") from None
    except (TypeError, ValueError) as e:
        raise ModelError(f"{where}: a number has the wrong type: {e}") from None


def _norm_groups(config: Mapping[str, Any]) -> int:
    groups = int(config["rms_norm_groups"]) if config["model_type"] == "k2_horizon" else 1
    if groups < 1 or int(config["hidden_size"]) % groups:
        raise ValueError(f"rms_norm_groups = {groups} must divide hidden_size = {config['hidden_size']}")
    return groups


def _sparse(config: Mapping[str, Any]) -> bool:
    return config["model_type"] == "qwen3_moe" or (config["model_type"] == "k2_horizon" and bool(config.get("num_experts")))


def _experts(config: Mapping[str, Any]) -> Experts:
    dense: set[int] = set(config.get("mlp_only_layers") or ()) | set(range(int(config.get("first_k_dense_replace") or 0)))
    every = int(config.get("decoder_sparse_step", 1))
    return Experts(
        count=int(config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]),  # transformers 5 renamed it
        topk=int(config["num_experts_per_tok"]),
        ffn_hidden=int(config["moe_intermediate_size"]),
        normalize_topk=bool(config.get("norm_topk_prob", False)),
        layers=tuple(i not in dense and (i + 1) % every == 0 for i in range(int(config["num_hidden_layers"]))),
    )
