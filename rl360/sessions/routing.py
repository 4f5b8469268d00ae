"""Expert choices of a session, one delta a turn (S9, S10). Pure.

An engine returns base64 of little-endian int32 rows [start, prompt + output - 1): of its MoE layers (tiny), or of all its layers
(SGLang, which says nothing that means something at a dense one). Here they become one byte an id (two above 256 experts), of MoE
layers only. A turn brings only rows that its parents don't have; the last sampled token never has a row.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl360.bus.events import RoutingDelta
from rl360.bus.payload import Payload
from rl360.bus.sample import Routing

Rows = NDArray[np.uint8 | np.uint16]
"""[rows, MoE layers, top-k]"""

Stored = Callable[[int, int], Rows]
"""Rows [start, end) that a session holds."""


class RoutingError(ValueError):
    """Rows that can't be used: the turn is refused (S9)."""


class RoutingShape(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` counts MoE layers only; dense layers have no row.

    `moe` and `sent` are for engines that send a row for every layer: which of its `sent` layers are MoE layers.
    """

    layers: int
    topk: int
    experts: int
    moe: tuple[int, ...] = ()
    sent: int = 0

    @property
    def dtype(self) -> str:
        """By the number of experts, not by the ids seen (CASES 24)."""
        return "uint8" if self.experts <= 256 else "uint16"


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New rows [first, first + len(rows)) of a turn, and how the rows that were there already compare."""

    first: int
    rows: Rows
    overlap_rows: int = 0
    overlap_mismatch: int = 0


def shape_of(config: dict[str, Any], *, every_layer: bool = False) -> RoutingShape:
    """Shape by a config.json; `every_layer`: as an engine sends it that has rows of all layers. Raises RoutingError without experts."""
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    topk = config.get("num_experts_per_tok") or 0
    dense = set(cast(list[int], config.get("mlp_only_layers") or ())) | set(range(config.get("first_k_dense_replace") or 0))
    every = config.get("decoder_sparse_step") or 1
    layers = [i for i in range(config.get("num_hidden_layers") or 0) if i not in dense and (i + 1) % every == 0]
    if not experts or not topk or not layers:
        raise RoutingError("config.json: the policy has no experts: set engine.routed_experts = false")
    shape = RoutingShape(layers=len(layers), topk=topk, experts=experts)
    return msgspec.structs.replace(shape, moe=tuple(layers), sent=config["num_hidden_layers"]) if every_layer else shape


def decode(data: str, shape: RoutingShape) -> Rows:
    """Rows of an engine's reply. Raises RoutingError for anything that isn't whole rows of known experts, each once in a layer."""
    try:
        raw = binascii.a2b_base64(data, strict_mode=True)
    except (binascii.Error, ValueError) as e:
        raise RoutingError(f"routed_experts is not base64: {e}") from None
    layers = shape.sent or shape.layers
    if len(raw) % (4 * layers * shape.topk):
        raise RoutingError(f"routed_experts has {len(raw)} bytes: not rows of {layers} layers x {shape.topk}")
    ids = np.frombuffer(raw, "<i4").reshape(-1, layers, shape.topk)
    if shape.sent:
        ids = ids[:, shape.moe]
    if ids.size and (ids.min() < 0 or ids.max() >= shape.experts):
        raise RoutingError(f"routed_experts names expert {ids.min()}..{ids.max()}: the policy has {shape.experts}")
    rows: Rows = ids.astype("<u2") if shape.dtype == "uint16" else ids.astype("u1")
    if (twice := repeated(rows)).any():
        row, layer = np.unravel_index(int(twice.argmax()), twice.shape)
        raise RoutingError(f"routed_experts names an expert twice, in row {row}, MoE layer {layer}: {rows[row, layer].tolist()}")
    return rows


def repeated(rows: Rows) -> NDArray[np.bool_]:
    """[rows, layers]: whether a layer names an expert twice."""
    found = np.zeros(rows.shape[:2], np.bool_)
    by_choice = np.ascontiguousarray(np.moveaxis(rows, 2, 0))
    for a, b in combinations(by_choice, 2):
        found |= a == b
    return found


def place(rows: Rows, *, tokens: int, held: int, stored: Stored) -> Delta:
    """Rows of a conversation of `tokens` tokens, of which the session holds the first `held`.

    The rows end at tokens - 1, so their number says where they start. A gap raises RoutingError; an overlap is compared with
    `stored(start, end)`, expert sets a layer, and counted: it tells how often a later forward routed differently.
    """
    first = tokens - 1 - len(rows)
    if first < 0:
        raise RoutingError(f"{len(rows)} expert rows for {tokens} tokens")
    if first > held:
        raise RoutingError(f"expert rows start at {first}, the session holds {held}: rows are missing between")
    overlap = held - first
    mismatch = _mismatch(rows[:overlap], stored(first, held)) if overlap else 0
    return Delta(first=held, rows=rows[overlap:], overlap_rows=overlap, overlap_mismatch=mismatch)


def _mismatch(a: Rows, b: Rows) -> int:
    """Rows whose expert sets differ in a layer."""
    differ: NDArray[np.bool_] = np.sort(a, axis=2) != np.sort(b, axis=2)
    return int(differ.any(axis=(1, 2)).sum())


def rows_of(event: RoutingDelta, data: bytes) -> Rows:
    """Rows of a journal event."""
    return np.frombuffer(data, "u1" if event.dtype == "uint8" else "<u2").reshape(event.rows, event.layers, event.topk)


def stitch(path: Sequence[RoutingDelta], unpack: Callable[[Payload], bytes]) -> Rows | None:
    """Rows from 0 on of the turns of one branch, up to the first hole (None: no turn has any)."""
    blocks: list[Rows] = []
    held = 0
    for event in path:
        if event.first > held:
            break
        rows = rows_of(event, unpack(event.data))
        blocks.append(rows[held - event.first :])
        held = max(held, event.first + event.rows)
    return np.concatenate(blocks) if blocks else None


def pack_rows(rows: Rows) -> Routing:
    """Rows as a sample carries them."""
    n, layers, topk = rows.shape
    return Routing(rows=n, layers=layers, topk=topk, dtype=str(rows.dtype), data=rows.tobytes())


NO_ROWS: Final = "routed_experts is missing: start the engine with expert capture, or set engine.routed_experts = false (S10)"
