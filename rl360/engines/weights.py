"""Weights as a plan and a push see them: what a tensor is, and experts that other ranks of the trainer hold."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from torch import Tensor

from rl360.engines.checksum import dtype_name
from rl360.engines.plan import ShardSpec, expert_of


class HeldExpert(msgspec.Struct, frozen=True, kw_only=True):
    """A weight of an expert that a rank of the trainer holds and sends by itself, and its checksum."""

    shard: ShardSpec
    checksum: str


def shard_specs(weights: Mapping[str, Tensor]) -> list[ShardSpec]:
    """The weights as a plan sees them."""
    return [shard_spec(name, tensor) for name, tensor in weights.items()]


def shard_spec(name: str, tensor: Tensor, *, rank: int = 0) -> ShardSpec:
    """One weight, on the meta device too."""
    size = tensor.numel() * tensor.element_size()
    return ShardSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), bytes=size, expert=expert_of(name), rank=rank)
