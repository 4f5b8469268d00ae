"""Control routes: pause and continue, abort, flush, weight groups and updates, checksum."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from rl360.engines.checksum import checksum_of
from rl360.engines.contract import (
    AbortRequest,
    ChecksumRank,
    ChecksumReply,
    ChecksumRequest,
    DestroyWeightsGroup,
    Done,
    InitWeightsGroup,
    PauseReply,
    PauseRequest,
    UpdateExperts,
    UpdateFromDistributed,
    UpdateWeightVersion,
)
from rl360.engines.tiny.buckets import version_refusal
from rl360.engines.tiny.engine import Engine
from rl360.engines.tiny.groups import GroupError
from rl360.engines.tiny.loop import EngineDown
from rl360.engines.tiny.updates import UpdateError

S = TypeVar("S", bound=msgspec.Struct)
_encoder = msgspec.json.Encoder()


def routes(engine: Engine) -> list[web.RouteDef]:
    control = _Control(engine)
    return [
        _post("/pause_generation", PauseRequest, control.pause),
        _bare("/continue_generation", control.resume),
        _post("/abort_request", AbortRequest, control.abort),
        _bare("/flush_cache", control.flush),
        _post("/init_weights_update_group", InitWeightsGroup, control.join),
        _post("/destroy_weights_update_group", DestroyWeightsGroup, control.leave),
        _bare("/begin_weight_update", control.begin),
        _bare("/end_weight_update", control.end),
        _post("/update_weights_from_distributed", UpdateFromDistributed, control.update),
        _post("/update_experts_from_ranks", UpdateExperts, control.update_experts),
        _post("/update_weight_version", UpdateWeightVersion, control.relabel),
        _post("/weights_checker", ChecksumRequest, control.checksum),
    ]


def _post(path: str, body: type[S], handle: Callable[[S], Awaitable[web.Response]]) -> web.RouteDef:
    """A route whose body is a `body`, refused with 400 when it is something else."""
    decoder = msgspec.json.Decoder(body)

    async def handler(http: web.Request) -> web.Response:
        try:
            order = decoder.decode(await http.read())
        except msgspec.MsgspecError as e:
            return _refused(f"{path}: {e}")
        return await _answered(handle(order))

    return web.post(path, handler)


def _bare(path: str, handle: Callable[[], Awaitable[web.Response]]) -> web.RouteDef:
    """A route whose body says nothing."""

    async def handler(http: web.Request) -> web.Response:
        return await _answered(handle())

    return web.post(path, handler)


async def _answered(answer: Awaitable[web.Response]) -> web.Response:
    try:
        return await answer
    except (UpdateError, GroupError) as e:
        return _refused(str(e))
    except EngineDown as e:
        return _json(Done(success=False, message=str(e)), 500)


class _Control:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def pause(self, order: PauseRequest) -> web.Response:
        await self._engine.call(lambda: self._engine.scheduler.pause(order.mode))
        return _json(PauseReply(message="Generation paused successfully."))

    async def resume(self) -> web.Response:
        await self._engine.call(self._engine.scheduler.resume)
        return _json(PauseReply(message="Generation continued successfully."))

    async def abort(self, order: AbortRequest) -> web.Response:
        if not order.rid and not order.abort_all:
            return _refused("/abort_request: name a rid, or set abort_all")
        await self._engine.call(lambda: self._engine.scheduler.abort("" if order.abort_all else order.rid))
        return web.Response()

    async def flush(self) -> web.Response:
        if await self._engine.call(self._engine.scheduler.flush):
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Flush cache failed: requests hold slots; retract or finish them first.\n")

    async def join(self, order: InitWeightsGroup) -> web.Response:
        await self._engine.groups.join(order)
        return _json(Done(success=True, message="Succeeded to initialize custom process group."))

    async def leave(self, order: DestroyWeightsGroup) -> web.Response:
        self._engine.groups.leave(order.group_name)
        return _json(Done(success=True, message="Succeeded to destroy custom process group."))

    async def begin(self) -> web.Response:
        self._engine.updates.begin()
        return _json(Done(success=True, message="Success"))

    async def end(self) -> web.Response:
        await self._engine.updates.end()
        return _json(Done(success=True, message=f"Success. Weight version is {self._engine.scheduler.version}."))

    async def update(self, order: UpdateFromDistributed) -> web.Response:
        await self._engine.updates.update(order)
        return _json(Done(success=True, message="Succeeded to update parameter online."))

    async def update_experts(self, order: UpdateExperts) -> web.Response:
        await self._engine.updates.update_experts(order)
        return _json(Done(success=True, message="Succeeded to update experts online."))

    async def relabel(self, order: UpdateWeightVersion) -> web.Response:
        """The label alone (CASES 29): requests go on, cached KV stays."""
        if why := version_refusal(order.new_version):
            return _refused(why)
        if order.abort_all_requests:
            return _refused("abort_all_requests: a label never aborts requests; use /abort_request")
        await self._engine.call(lambda: self._engine.scheduler.relabel(order.new_version))
        return _json(Done(success=True, message=f"Weight version updated to {order.new_version}"))

    async def checksum(self, order: ChecksumRequest) -> web.Response:
        """Digests of the live weights, computed beside the engine's thread: live weights are never written."""
        weights = self._engine.updates.live
        digests = await asyncio.to_thread(checksum_of, list(weights.named.items()))
        return _json(ChecksumReply(success=True, message="Success.", ranks=[ChecksumRank(checksums=digests)]))


def _json(body: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(body), status=status, content_type="application/json")


def _refused(message: str) -> web.Response:
    return _json(Done(success=False, message=message), 400)
