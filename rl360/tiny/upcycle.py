"""A mixture-of-experts policy made of a dense one: each expert starts as the dense MLP, and is moved a little by noise.

With the gates of the chosen experts adding up to 1, equal experts compute what the dense MLP did, whatever the router chooses: so the new
policy starts at the dense one's reward, but for the noise, which lets experts part. As in the large models every layer has experts,
and the output matrix is not the embedding: SGLang knows no other Qwen3-MoE.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import blake3
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from safetensors.torch import save as safetensors
from torch import Tensor

WEIGHTS: Final = "model.safetensors"
_OUTPUT: Final = "lm_head.weight"
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


class UpcycleError(ValueError):
    """A policy that can't be made a mixture of experts: the message names the file and the key."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`noise`: of an expert's weights, in standard deviations of the dense weight. `router_std`: of the router's weights."""

    experts: int
    topk: int
    noise: float = 0.02
    router_std: float = 0.1


def upcycle(source: Path, out: Path, recipe: Recipe, seed: int) -> None:
    """Write the policy of `recipe` made of the dense Qwen3 in `source` into `out`; the seed decides every draw. Raises UpcycleError."""
    settings = json.loads((source / "config.json").read_text())
    if settings.get("model_type") != "qwen3":
        raise UpcycleError(f"{source / 'config.json'}: model_type is {settings.get('model_type')!r}: only a dense qwen3 can be upcycled")
    layers = int(settings["num_hidden_layers"])
    dense = load_file(source / WEIGHTS)
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in (WEIGHTS, "config.json"):
            shutil.copyfile(path, out / path.name)
    tensors = dict(_tensors(dense, range(layers), recipe, torch.Generator().manual_seed(seed)))
    (out / WEIGHTS).write_bytes(safetensors(tensors, metadata={"format": "pt"}))
    origin = {"policy": blake3.blake3((source / WEIGHTS).read_bytes()).hexdigest(), "seed": seed, "noise": recipe.noise}
    (out / "config.json").write_text(json.dumps(_settings(settings, recipe) | {"upcycled_from": origin}, indent=2) + "\n")


def _settings(dense: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    return dense | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.topk,
        "moe_intermediate_size": dense["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    }


def _tensors(dense: dict[str, Tensor], layers: range, recipe: Recipe, draws: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    replaced = {f"model.layers.{i}.mlp.{part}.weight" for i in layers for part in _MLP}
    yield from ((name, tensor) for name, tensor in sorted(dense.items()) if name not in replaced)
    if _OUTPUT not in dense:
        yield _OUTPUT, dense["model.embed_tokens.weight"].clone()
    for i in layers:
        mlp = f"model.layers.{i}.mlp"
        hidden = dense[f"{mlp}.gate_proj.weight"].shape[1]
        yield f"{mlp}.gate.weight", torch.randn(recipe.experts, hidden, generator=draws) * recipe.router_std
        for expert in range(recipe.experts):
            for part in _MLP:
                weight = dense[f"{mlp}.{part}.weight"]
                moved = weight + torch.randn(weight.shape, generator=draws) * (recipe.noise * weight.std())
                yield f"{mlp}.experts.{expert}.{part}.weight", moved
