"""Hugging Face's weights of Qwen3 and Qwen3-MoE as SGLang holds them: fused, and cut by tensor and expert parallel rank. Pure.

    qkv_proj      rows: this rank's query heads, then key heads, then value heads
    gate_up_proj  rows: this rank's share of gate, then of up
    experts       w13_weight [local experts, gate rows then up rows, hidden], w2_weight [local experts, hidden, share]
    vocabulary    padded with rows of 0 to a multiple of 64, then cut by rows

Agrees with the checksums of running servers: SGLang 0.5.23 on a CPU with tp 1, tp 2, and tp 2 with ep 2; 0.5.17 on an H200 with tp 1.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]

_VOCAB_MULTIPLE: Final = 64
_EXPERT: Final = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", re.ASCII)
_VOCABULARY: Final = ("model.embed_tokens.weight", "lm_head.weight")


def held_by(weights: Weights, *, rank: int, tp: int, ep: int = 1) -> Iterator[tuple[str, Tensor]]:
    """(SGLang's name, tensor) of every parameter that TP rank `rank` of `tp` holds. Whole tensors are not copied.

    `ep` divides `tp`: the experts are cut into `ep` blocks, and each expert's rows over the `tp / ep` ranks of a block.
    """
    for name, tensor in weights.items():
        stem = name.removesuffix("q_proj.weight")
        if name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")) or _EXPERT.fullmatch(name):
            continue  # made with its partner
        if stem != name:
            yield stem + "qkv_proj.weight", _qkv(weights, stem, rank, tp)
        elif name.endswith("gate_proj.weight"):
            stem = name.removesuffix("gate_proj.weight")
            yield stem + "gate_up_proj.weight", _rows([tensor, weights[stem + "up_proj.weight"]], rank, tp)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            yield name, tensor.chunk(tp, dim=1)[rank]
        elif name in _VOCABULARY:
            yield name, _padded(tensor).chunk(tp)[rank]
        else:
            yield name, tensor
    yield from _experts(weights, rank, tp, ep)


def _rows(parts: Sequence[Tensor], rank: int, of: int) -> Tensor:
    return torch.cat([part.chunk(of)[rank] for part in parts])


def _qkv(weights: Weights, stem: str, rank: int, tp: int) -> Tensor:
    """Fewer key heads than ranks: neighbouring ranks hold the same one."""
    heads = weights[stem + "k_proj.weight"].shape[0] // weights[stem + "k_norm.weight"].shape[0]
    shares = min(tp, heads)
    keys = [weights[f"{stem}{x}_proj.weight"].chunk(shares)[rank * shares // tp] for x in "kv"]
    return torch.cat([weights[stem + "q_proj.weight"].chunk(tp)[rank], *keys])


def _padded(vocabulary: Tensor) -> Tensor:
    missing = -len(vocabulary) % _VOCAB_MULTIPLE
    return torch.cat([vocabulary, vocabulary.new_zeros(missing, vocabulary.shape[1])]) if missing else vocabulary


def _experts(weights: Weights, rank: int, tp: int, ep: int) -> Iterator[tuple[str, Tensor]]:
    layers: dict[str, int] = {}
    for name in weights:
        if found := _EXPERT.fullmatch(name):
            layers[found[1]] = max(layers.get(found[1], 0), int(found[2]) + 1)
    share = tp // ep  # ranks that share an expert
    for stem, count in layers.items():
        mine = range(rank // share * count // ep, (rank // share + 1) * count // ep)
        both = [[weights[f"{stem}.{e}.{x}_proj.weight"] for x in ("gate", "up")] for e in mine]
        yield stem + ".w13_weight", torch.stack([_rows(pair, rank % share, share) for pair in both])
        down = [weights[f"{stem}.{e}.down_proj.weight"].chunk(share, dim=1)[rank % share] for e in mine]
        yield stem + ".w2_weight", torch.stack(down)
