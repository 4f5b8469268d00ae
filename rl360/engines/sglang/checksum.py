"""The hashes of SGLang's `/weights_checker`, computed on the trainer's own tensors: that a server holds them is then proven.

They cover bytes alone; names and shapes agree because the server loads by name and refuses another shape.
Source: SGLang's own code and replies: sha256 on a CPU, a mix of 32-bit words on a GPU (Triton there, torch operations here).
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch
from torch import Tensor

from rl360.engines.sglang.layout import held_by

_SEED: Final = 0x243F6A88
_SEEDS: Final = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_FACTORS: Final = (0x27D4EB2D, 0x165667B1)
_TURNS: Final = (15, 13)
_TILE: Final = 8192  # words that are hashed to one value
_CHUNK: Final = 2048 * _TILE  # words at a time: bounds the memory of the temporaries
_MASK64: Final = (1 << 64) - 1


def checksums(weights: Mapping[str, Tensor], *, kind: Literal["fused_cpu", "fused_cuda"], tp: int, ep: int) -> list[dict[str, str]]:
    """Checksum of every parameter by SGLang's name, for each TP rank of a server that holds `weights` (by Hugging Face's names)."""
    digest = sha256_of if kind == "fused_cpu" else mix_of
    return [{name: digest(t) for name, t in held_by(weights, rank=rank, tp=tp, ep=ep)} for rank in range(tp)]


def sha256_of(tensor: Tensor) -> str:
    """First 8 bytes of the sha256 of a tensor's bytes, in hex.

    >>> sha256_of(torch.ones(64, dtype=torch.bfloat16))
    'e72710531b01d91e'
    """
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).digest()[:8].hex()


def mix_of(tensor: Tensor) -> str:
    """SGLang's hash of a tensor on a GPU, computed where the tensor is.

    >>> mix_of(torch.ones(64, dtype=torch.bfloat16))
    'a98f7adcceb5de1e'
    """
    words = _words(tensor)
    size = _signed(4 * len(words))
    total = 0
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        at = torch.arange(start, start + len(part), device=part.device, dtype=torch.int64).to(torch.int32)
        high, low = (_mixed(_tile_sums(_mixed(part ^ place)) ^ size) for place in _places(at))
        total += int(((_unsigned(high) << 32) | _unsigned(low)).sum())
    return f"{_finished(total & _MASK64):016x}" if len(words) else f"{0:016x}"


def _words(tensor: Tensor) -> Tensor:
    """The bytes as int32, the last word filled up with 0. int32 arithmetic wraps as uint32 does."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if missing := -len(data) % 4:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int32)


def _places(at: Tensor) -> list[Tensor]:
    """What tells equal words at different places apart, one stream for each half of the hash."""
    streams = zip(_FACTORS, _SEEDS, _TURNS, strict=True)
    return [(at * _signed(factor) + _signed(seed)) ^ ((at << turn) | _shifted(at, 32 - turn)) for factor, seed, turn in streams]


def _mixed(x: Tensor) -> Tensor:
    """Murmur3's finalizer."""
    x = (x ^ _shifted(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shifted(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shifted(x, 16)


def _tile_sums(x: Tensor) -> Tensor:
    """Sums of the words of each tile, mod 2^32."""
    if missing := -len(x) % _TILE:
        x = torch.cat([x, x.new_zeros(missing)])
    return x.view(-1, _TILE).sum(dim=1, dtype=torch.int64).to(torch.int32)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Right shift that brings in zeros."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _unsigned(x: Tensor) -> Tensor:
    return x.to(torch.int64) & 0xFFFFFFFF


def _signed(x: int) -> int:
    """A 32-bit constant as int32."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def _finished(x: int) -> int:
    """Splitmix64's finalizer."""
    steps: list[Callable[[int], int]] = [lambda x: (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9, lambda x: (x ^ (x >> 27)) * 0x94D049BB133111EB]
    for step in steps:
        x = step(x) & _MASK64
    return x ^ (x >> 31)
