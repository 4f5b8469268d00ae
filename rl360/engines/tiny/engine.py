"""One engine: model, scheduler, thread and updates put together, as the HTTP server drives it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from rl360.engines.contract import GenerateChunk, GenerateReply, GenerateRequest
from rl360.engines.tiny import replies
from rl360.engines.tiny.admission import Limits, refusal, stops
from rl360.engines.tiny.batching import Scheduler
from rl360.engines.tiny.groups import Groups
from rl360.engines.tiny.loop import EngineDown, EngineLoop
from rl360.engines.tiny.model import Model
from rl360.engines.tiny.requests import Request
from rl360.engines.tiny.shape import ModelError, read_shape
from rl360.engines.tiny.updates import Updates
from rl360.engines.tiny.weights import load_weights

T = TypeVar("T")
_log = logging.getLogger("rl360.engine")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """`slots` sequences keep their KV; `timeout` bounds a collective call, and a pause that nobody ends."""

    model: Path
    generation: str
    slots: int = 64
    context: int = 0  # tokens of a whole conversation; 0: as many as the model knows
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    routed_experts: bool = False
    version: str = "0"
    timeout: float = 60.0
    ep: int = 1  # ranks in a push: each takes part in it as a GPU would, and receives its share of the experts


class Refused(Exception):
    """A request that is answered 400."""


class Failed(Exception):
    """A request that the engine took and could not carry out."""


class Engine:
    """Made and used in one asyncio loop; sampling runs in a thread of its own."""

    def __init__(self, options: EngineOptions) -> None:
        shape = read_shape(options.model)
        context = options.context or shape.context
        if context > shape.context:
            raise ModelError(f"{options.model}: a context of {context} tokens was asked for, the model knows {shape.context}")
        if options.routed_experts and not shape.moe_layers:
            raise ModelError(f"{options.model}: routed experts were asked for, the model has none: engine.routed_experts = false")
        if options.ep > 1 and (not shape.moe_layers or shape.experts % options.ep):
            raise ModelError(f"{options.model}: {options.ep} ranks can't share out {shape.experts} experts evenly: change engine.ep")
        weights = load_weights(options.model, shape, cast(torch.dtype, getattr(torch, options.dtype)))
        model = Model(weights, slots=options.slots, context=context, capture_experts=options.routed_experts)
        self.options = options
        self.limits = Limits(vocab=shape.vocab, context=context, stop_ids=shape.stop_ids)
        self.scheduler = Scheduler(model, version=options.version, seed=options.seed, on_finish=self._finished)
        self.loop = EngineLoop(self.scheduler, pause_limit=options.timeout)
        self.groups = Groups(options.timeout, options.ep)
        self.updates = Updates(self.loop, self.groups)
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what ended the engine's thread, when it ends by itself."""
        self._texts = replies.Texts(options.model)
        self._asyncio = asyncio.get_running_loop()
        self._pending: dict[str, asyncio.Future[None]] = {}

    def start(self) -> None:
        self.loop.start().add_done_callback(self._ended)

    def stop(self) -> None:
        self.loop.stop()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the engine's thread, between two steps."""
        return await asyncio.wrap_future(self.loop.call(function))

    async def generate(self, asked: GenerateRequest, progress: Callable[[GenerateChunk], None] | None = None) -> GenerateReply:
        """Sample a reply; `progress` gets each chunk of a streamed one. Raises Refused or Failed.

        Cancelling the call (the client hung up) aborts the request.
        """
        request = self._request(asked, progress)
        done = self._pending[request.rid] = self._asyncio.create_future()
        try:
            if not await self.call(lambda: self.scheduler.submit(request)):
                raise Refused(f"Duplicate request ID detected: {request.rid}")
            await done
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDown):
                self.loop.call(lambda: self.scheduler.cancel(request.rid))
            raise
        finally:
            self._pending.pop(request.rid, None)
        if request.error:
            raise Failed(request.error)
        return replies.reply(request, asked, self._texts, self.options.generation)

    def _request(self, asked: GenerateRequest, progress: Callable[[GenerateChunk], None] | None) -> Request:
        if why := refusal(asked, self.limits):
            raise Refused(why)
        rid = asked.rid or uuid.uuid4().hex
        if rid in self._pending:
            raise Refused(f"Duplicate request ID detected: {rid}")
        request = Request(
            rid=rid,
            ids=list(asked.input_ids),
            prompt=len(asked.input_ids),
            max_new=asked.sampling_params.max_new_tokens,
            stop=stops(asked, self.limits),
            temperature=asked.sampling_params.temperature,
            experts_from=asked.routed_experts_start_len if asked.return_routed_experts else None,
        )
        if progress is not None:
            request.on_token = lambda: self._progress(request, asked, progress)
        return request

    def _progress(self, request: Request, asked: GenerateRequest, progress: Callable[[GenerateChunk], None]) -> None:
        so_far = replies.chunk(request, asked, self._texts, self.options.generation)
        self._asyncio.call_soon_threadsafe(progress, so_far)

    def _finished(self, request: Request) -> None:
        self._asyncio.call_soon_threadsafe(self._answer, request.rid)

    def _answer(self, rid: str) -> None:
        future = self._pending.get(rid)
        if future is not None and not future.done():
            future.set_result(None)

    def _ended(self, ended: Future[Any]) -> None:
        error = ended.exception()
        if error is not None:
            self._asyncio.call_soon_threadsafe(self._crash, error)

    def _crash(self, error: BaseException) -> None:
        _log.error("the engine's thread ended: %r", error)
        if not self.crashed.done():
            self.crashed.set_exception(error)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Failed(f"the engine is gone: {error!r}"))
