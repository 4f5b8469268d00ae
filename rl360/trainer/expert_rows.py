"""Recorded expert choices of a sample, checked before the trainer replays them (S11). Pure.

A sample has one row a token but the last (S8), one entry a MoE layer, `topk` experts an entry. megatron's dispatcher crashes on an expert
that is chosen twice or isn't there, and routes silently by other tokens' rows when some are missing: so all of it is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl360.bus.sample import Routing, Sample
from rl360.sessions.routing import RoutingShape, Rows, repeated


class ReplayError(ValueError):
    """Recorded routing that can't be replayed: the message names attempt, branch, turn and row."""


def expert_rows(sample: Sample, routing: Routing | None, shape: RoutingShape) -> Rows:
    """[len(sample) - 1, layers, topk] of a policy of `shape`. Raises ReplayError."""
    name = f"{sample.attempt}/{sample.branch}"
    if routing is None:
        raise ReplayError(f"{name}: has no recorded experts: set engine.routed_experts = true, or trainer.routing_replay = false")
    if (routing.layers, routing.topk, routing.dtype) != (shape.layers, shape.topk, shape.dtype):
        raise ReplayError(
            f"{name}: recorded {routing.layers} layers x {routing.topk} experts in {routing.dtype}, "
            f"the policy has {shape.layers} MoE layers x {shape.topk} in {shape.dtype}"
        )
    wanted = len(sample) - 1
    bytes_wanted = routing.rows * shape.layers * shape.topk * np.dtype(shape.dtype).itemsize
    if routing.rows < wanted:
        raise ReplayError(
            f"{_place(sample, routing.rows)}: no recorded experts from this row on: {routing.rows} rows where {wanted} are due"
        )
    if routing.rows > wanted or len(routing.data) != bytes_wanted:
        raise ReplayError(f"{name}: {routing.rows} rows in {len(routing.data)} bytes; {wanted} rows in {bytes_wanted} bytes are due")
    rows = routing.array
    _refuse(sample, rows >= shape.experts, f"names an expert that the policy lacks: it has {shape.experts}")
    _refuse(sample, repeated(rows), "names an expert twice in a layer")
    return rows


def pack_rows(
    rows: Sequence[Rows], lengths: Sequence[int], shape: RoutingShape, layers: slice = slice(None)
) -> NDArray[np.uint8 | np.int16]:
    """Rows of several samples in THD order, [sum(lengths), layers, topk]; torch knows no arithmetic on uint16, so int16 in its place.

    A sequence's last token has no row, nor has padding. They take experts 0, 1, …: nothing is predicted from them.
    """
    dtype = np.uint8 if shape.dtype == "uint8" else np.int16
    packed = np.empty((sum(lengths), len(range(shape.layers)[layers]), shape.topk), dtype)
    packed[:] = np.arange(shape.topk)
    start = 0
    for block, length in zip(rows, lengths, strict=False):  # sequences beyond the samples are padding
        packed[start : start + len(block)] = block
        start += length
    return packed


def _refuse(sample: Sample, wrong: NDArray[np.bool_], why: str) -> None:
    """`wrong`: [rows, layers] or [rows, layers, topk]."""
    if wrong.any():
        row, layer, *_ = np.unravel_index(int(wrong.argmax()), wrong.shape)
        raise ReplayError(f"{_place(sample, int(row))}, MoE layer {int(layer)}: {why}")


def _place(sample: Sample, row: int) -> str:
    """A turn of a branch ends with its sampled tokens."""
    mask = sample.mask[: row + 1].astype(np.int8)
    turn = 1 + int(np.count_nonzero(np.diff(mask) < 0))
    return f"{sample.attempt}/{sample.branch}, turn {turn} of the branch, row {row}"
