"""Continuous batching: what runs in the next step. One thread, the engine's, calls everything here.

A step prefills waiting requests, when enough wait or one has waited long enough, else decodes one token of every running request.
Weights change between steps only; running requests go on under the new ones; every token and KV row says which weights made it
(CASES 30).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from rl360.engines.contract import FinishReason, PauseMode, WeightSpan
from rl360.engines.tiny.cache import Slot, Slots, Stamp, common_prefix
from rl360.engines.tiny.model import Model, Piece, check_order
from rl360.engines.tiny.requests import ABORTED, Request
from rl360.engines.tiny.sampling import Temperatures, sample
from rl360.engines.tiny.weights import Weights

PREFILL_TOKENS: Final = 4096
"""New tokens of one prefill step, so that running requests never wait long for their next token."""
GATHER_STEPS: Final = 4
"""Decode steps that a request waits for company: a prefill of a few requests costs about what a prefill of one does."""
GATHER_SHARE: Final = 4
"""One waiting request for this many running ones is company enough."""
SHARED_TOKENS: Final = 16
"""A request that shares this much more with one being prefilled than with the cache waits a step and copies it."""


@dataclass(kw_only=True)
class Counters:
    """Totals since the engine started."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stale_cached_tokens: int = 0  # of the cached: written by older weights
    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    updates: int = 0
    steps: int = 0
    paused_seconds: float = 0.0
    forced_resumes: int = 0


@dataclass(kw_only=True, slots=True)
class _DecodeBatch:
    requests: list[Request]
    slots: Tensor
    ids: Tensor
    positions: Tensor
    temperatures: Temperatures


class Scheduler:
    """Requests, their slots, and the model. `on_finish` is called with each request that ends."""

    def __init__(self, model: Model, *, version: str, seed: int, on_finish: Callable[[Request], None]) -> None:
        self.model, self.version = model, version
        self.epoch = 0
        self.slots = Slots(model.slots)
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.counters = Counters()
        self.paused_at: float | None = None  # time.monotonic()
        self._on_finish = on_finish
        self._generator = torch.Generator().manual_seed(seed)
        self._batch: _DecodeBatch | None = None
        self._gathered = 0  # decode steps since a request waits

    @property
    def runnable(self) -> bool:
        return self.paused_at is None and bool(self.waiting or self.running)

    def submit(self, request: Request) -> bool:
        """Queue a request. False: its rid is in use."""
        if request.rid in self.waiting or request.rid in self.running:
            return False
        self.waiting[request.rid] = request
        self.counters.requests += 1
        return True

    def abort(self, prefix: str) -> None:
        """End every request whose rid starts with `prefix`, keeping what it has sampled. Works while paused."""
        for rid in [rid for rid in (*self.running, *self.waiting) if rid.startswith(prefix)]:
            self.cancel(rid)

    def cancel(self, rid: str) -> None:
        """End the one request `rid`, if it is still here."""
        request = self.running.get(rid) or self.waiting.get(rid)
        if request is not None:
            self.counters.aborted += 1
            self._finish(request, ABORTED)

    def pause(self, mode: PauseMode) -> None:
        """Stop before the next step: in place (KV kept), by retraction (KV recomputed on resume) or by aborting all."""
        self.paused_at = self.paused_at or time.monotonic()
        if mode == "abort":
            self.abort("")
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        if self.paused_at is not None:
            self.counters.paused_seconds += time.monotonic() - self.paused_at
            self.paused_at = None

    def flush(self) -> bool:
        """Forget all cached KV. False, and nothing changes, while requests hold slots."""
        if self.running:
            return False
        self.slots.flush()
        return True

    def swap(self, weights: Weights, version: str | None, *, flush: bool) -> None:
        """Go on with other weights. With `flush`, running requests recompute their KV; without, old rows stay, stamped as old."""
        self.model.weights = weights
        self.epoch += 1
        self.counters.updates += 1
        if flush:
            self._retract()
            self.slots.flush()
        self.relabel(version or self.version)

    def relabel(self, version: str) -> None:
        """Change the version's label alone: never aborts or recomputes anything (CASES 29)."""
        self.version = version
        for request in self.running.values():
            request.label(version)
            self.slots.all[request.slot].stamp(self.epoch, version)

    def step(self) -> None:
        """One forward."""
        self.counters.steps += 1
        if self._due() and (chosen := self._admit()):
            self._gathered = 0
            self._prefill(chosen)
        elif self.running:
            self._gathered += bool(self.waiting)
            self._decode()

    def _due(self) -> bool:
        """Whether waiting requests are prefilled now."""
        return self._gathered >= GATHER_STEPS or GATHER_SHARE * len(self.waiting) >= len(self.running)

    def _retract(self) -> None:
        """Back to the queue, ahead of those that never ran; KV is given up, sampled tokens stay."""
        for request in self.running.values():
            slot = self.slots.all[request.slot]
            slot.cut(0)
            self.slots.release(slot)
            request.slot = -1
            request.retractions += 1
            self.counters.retractions += 1
        self.waiting = self.running | self.waiting
        self.running, self._batch = {}, None

    def _admit(self) -> list[Request]:
        """Give slots to waiting requests, in order, as far as slots and the token budget go."""
        chosen: list[Request] = []
        budget = PREFILL_TOKENS
        for request in list(self.waiting.values()):
            placement = self.slots.place(request.ids)
            if placement is None or budget <= 0:
                break
            if any(_shared(request, c) >= placement.cached + SHARED_TOKENS for c in chosen):
                continue
            if placement.source is not None:
                self.model.copy_rows(placement.source.index, placement.slot.index, placement.cached)
            self.slots.take(placement, request.ids)
            self._enter(request, placement.slot, placement.cached)
            budget -= len(request.ids) - placement.cached
            chosen.append(request)
        return chosen

    def _enter(self, request: Request, slot: Slot, cached: int) -> None:
        del self.waiting[request.rid]
        self.running[request.rid] = request
        request.slot = slot.index
        request.label(self.version)
        if request.cached is None:  # a retracted request keeps what it found the first time
            request.cached, request.entered = cached, time.time()
            self.counters.prompt_tokens += request.prompt
            self.counters.cached_tokens += cached
            self.counters.stale_cached_tokens += _stale(slot.stamps, cached, self.epoch)
        self._batch = None

    def _prefill(self, chosen: list[Request]) -> None:
        slots = [self.slots.all[r.slot] for r in chosen]
        logits = self.model.prefill([Piece(s.index, s.rows, r.ids[s.rows :]) for s, r in zip(slots, chosen, strict=True)])
        for slot, request in zip(slots, chosen, strict=True):
            self.counters.prefill_tokens += len(request.ids) - slot.rows
            slot.stamp(self.epoch, self.version)
            slot.rows = len(request.ids)
        tokens, logprobs = sample(logits, Temperatures.of([r.temperature for r in chosen]), self._generator)
        now = time.time()
        for request in chosen:
            request.prefilled = request.prefilled or now
        self._commit(chosen, tokens, logprobs)

    def _decode(self) -> None:
        batch = self._batch = self._batch or self._gather()
        logits = self.model.decode(batch.ids, batch.slots, batch.positions)
        for request in batch.requests:
            self.slots.all[request.slot].rows += 1
        self.counters.decode_tokens += len(batch.requests)
        batch.ids, logprobs = sample(logits, batch.temperatures, self._generator)
        batch.positions = batch.positions + 1
        self._commit(batch.requests, batch.ids, logprobs)

    def _gather(self) -> _DecodeBatch:
        """Tensors of all running requests, in the order of their slots, reused until somebody joins or leaves."""
        requests = sorted(self.running.values(), key=lambda r: r.slot)
        slots = torch.tensor([r.slot for r in requests])
        check_order(slots)
        return _DecodeBatch(
            requests=requests,
            slots=slots,
            ids=torch.tensor([r.ids[-1] for r in requests]),
            positions=torch.tensor([len(r.ids) - 1 for r in requests]),
            temperatures=Temperatures.of([r.temperature for r in requests]),
        )

    def _commit(self, requests: list[Request], tokens: Tensor, logprobs: Tensor) -> None:
        """Append each request's token, in the order of the batch, and end those that are done."""
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                request.error = f"the log-prob of a sampled token is not finite under weight version {self.version}: push weights again"
                self._finish(request, ABORTED)
                continue
            request.ids.append(token)
            request.logprobs.append(logprob)
            if reason := request.ended():
                self._finish(request, reason)
            elif request.on_token:
                request.on_token()

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.label(self.version)
        if request.slot >= 0:
            slot = self.slots.all[request.slot]
            request.kv_versions = _kv_versions(slot.stamps, slot.rows, self.version)
            request.experts = self._experts(request, slot)
            self.slots.release(slot)
        self.running.pop(request.rid, None)
        self.waiting.pop(request.rid, None)
        self._batch = None
        request.finish, request.finished = reason, time.time()
        self._on_finish(request)

    def _experts(self, request: Request, slot: Slot) -> str | None:
        """Base64 of the expert choices asked for; None: not asked, or the server doesn't capture them."""
        if self.model.experts is None or request.experts_from is None:
            return None
        rows = self.model.experts[slot.index, request.experts_from : slot.rows].to(torch.int32)
        return base64.b64encode(rows.contiguous().numpy().astype("<i4", copy=False).tobytes()).decode()


def _shared(a: Request, b: Request) -> int:
    return common_prefix(a.ids, b.ids, min(len(a.ids) - 1, len(b.ids)))


def _stale(stamps: Iterable[Stamp], cached: int, epoch: int) -> int:
    """Of the first `cached` rows, how many were written by weights of another epoch."""
    marks = [*stamps, Stamp(epoch, "", cached)]
    return sum(after.start - mark.start for mark, after in pairwise(marks) if mark.epoch != epoch)


def _kv_versions(stamps: Iterable[Stamp], rows: int, version: str) -> list[WeightSpan]:
    """Versions that wrote rows [0, rows); empty when all are by `version`."""
    marks = [s for s in stamps if s.start < rows]
    ends = [s.start for s in marks[1:]] + [rows]
    spans = [WeightSpan(version=s.version, start=s.start, end=e) for s, e in zip(marks, ends, strict=True)]
    return spans if any(s.version != version for s in spans) else []
