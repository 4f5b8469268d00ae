"""What a turn leaves in the journal."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl360.bus.blobs import BlobStore
from rl360.bus.events import RoutingDelta, TurnCompleted
from rl360.bus.payload import INLINE_LIMIT, Payload
from rl360.engines.contract import MetaInfo
from rl360.sessions.names import SessionName
from rl360.sessions.offload import off_loop
from rl360.sessions.prompts import Prompt
from rl360.sessions.routing import Delta
from rl360.sessions.sampled import Sampled


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A model call that was checked: what was sampled, its new expert rows (replay on), and how the call went."""

    sampled: Sampled
    meta: MetaInfo
    delta: Delta | None
    worker: str
    retries: int
    started: float
    ended: float


async def turn_event(
    run: str, name: SessionName, prompt: Prompt, outcome: Outcome, blobs: BlobStore, *, request_id: str, format_error: bool
) -> TurnCompleted:
    """The turn as an event; big arrays go to the blob store."""
    sampled, meta = outcome.sampled, outcome.meta
    return TurnCompleted(
        run=run,
        step=name.step,
        attempt=name.attempt,
        group=name.group,
        session=name.session,
        turn=prompt.number,
        branch=prompt.branch,
        parent=prompt.parent,
        base=prompt.base,
        prompt_ids=await pack(blobs, np.array(prompt.new, "<i4")),
        output_ids=await pack(blobs, np.array(sampled.ids, "<i4")),
        logprobs=await pack(blobs, sampled.logprobs),
        spans=sampled.spans,
        finish_reason=sampled.finish_reason,
        cached_tokens=meta.cached_tokens,
        prompt_tokens=prompt.tokens,
        best_cached=prompt.best_cached,
        generation=meta.generation or outcome.worker,
        request_id=request_id,
        started=outcome.started,
        ended=outcome.ended,
        format_error=format_error,
        rolled_back=prompt.dropped,
        retries=outcome.retries,
        history=prompt.asked.hex(),
    )


async def rows_event(run: str, name: SessionName, turn: int, delta: Delta, blobs: BlobStore) -> RoutingDelta:
    """A turn's new expert rows as an event."""
    rows, layers, topk = delta.rows.shape
    return RoutingDelta(
        run=run,
        step=name.step,
        attempt=name.attempt,
        group=name.group,
        session=name.session,
        turn=turn,
        first=delta.first,
        rows=rows,
        layers=layers,
        topk=topk,
        dtype=str(delta.rows.dtype),
        data=await pack(blobs, delta.rows),
        overlap_rows=delta.overlap_rows,
        overlap_mismatch=delta.overlap_mismatch,
    )


async def pack(blobs: BlobStore, array: NDArray[Any]) -> Payload:
    return await off_loop(lambda a: blobs.pack(a.tobytes()), array, size=array.nbytes, limit=INLINE_LIMIT)
