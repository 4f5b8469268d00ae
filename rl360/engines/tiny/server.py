"""The engine's HTTP face: SGLang's routes and replies, as far as `contract` states them.

A refused `/generate` is 400 {"error": {"message"}}; a refused weight call is 400 {"success": false, "message"}. `/health` answers
200 while paused, so that no gateway evicts an engine in the middle of a push.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web

from rl360.engines.contract import ErrorBody, ErrorReply, GenerateChunk, GenerateReply, GenerateRequest, Load, ModelInfo, ServerInfo
from rl360.engines.tiny.control import routes as control_routes
from rl360.engines.tiny.engine import Engine, Failed, Refused
from rl360.engines.tiny.loop import EngineDown
from rl360.engines.tiny.metrics import render

MAX_BODY: Final = 32 * 1024 * 1024
HEALTH_SECONDS: Final = 20.0
"""A step takes milliseconds; an engine's thread that is silent for this long is stuck."""

_generate = msgspec.json.Decoder(GenerateRequest)
_encoder = msgspec.json.Encoder()


def application(engine: Engine) -> web.Application:
    """All routes of an engine that has been started."""
    server = _Server(engine)
    app = web.Application(client_max_size=MAX_BODY)
    app.add_routes(
        [
            web.post("/generate", server.generate),
            web.get("/health", server.health),
            web.get("/health_generate", server.health),
            web.get("/v1/models", server.models),
            web.get("/model_info", server.model_info),
            web.get("/get_model_info", server.model_info),
            web.get("/server_info", server.server_info),
            web.get("/get_load", server.load),
            web.get("/metrics", server.metrics),
            *control_routes(engine),
        ]
    )
    return app


async def serve(engine: Engine, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Listen; returns the runner, to be cleaned up, and the port. A client that hangs up cancels its request."""
    runner = web.AppRunner(application(engine), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner, int(runner.addresses[0][1])


class _Server:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, http: web.Request) -> web.StreamResponse:
        try:
            asked = _generate.decode(await http.read())
            if asked.stream:
                return await self._stream(http, asked)
            return _json(await self._engine.generate(asked))
        except msgspec.MsgspecError as e:
            return _error(400, f"not a generate request: {e}")
        except Refused as e:
            return _error(400, str(e))
        except (Failed, EngineDown) as e:
            return _error(500, str(e))

    async def _stream(self, http: web.Request, asked: GenerateRequest) -> web.StreamResponse:
        """Server-sent events, each with all that was sampled so far; a refusal is still a plain 400."""
        chunks: asyncio.Queue[GenerateChunk | None] = asyncio.Queue()
        task = asyncio.create_task(self._engine.generate(asked, chunks.put_nowait))
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        try:
            while (chunk := await chunks.get()) is not None:
                await _send(http, response, _encoder.encode(chunk))
            await _send(http, response, _encoder.encode(await task))
        finally:
            task.cancel()
        await _send(http, response, b"[DONE]")
        return response

    async def health(self, http: web.Request) -> web.Response:
        """200 while the engine's thread answers, paused or not."""
        try:
            await asyncio.wait_for(self._engine.call(lambda: None), HEALTH_SECONDS)
        except (TimeoutError, EngineDown) as e:
            return web.Response(status=503, text=f"{type(e).__name__}: {e}")
        return web.Response()

    async def models(self, http: web.Request) -> web.Response:
        name = self._engine.options.model.name
        entry = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "rl360",
            "root": name,
            "max_model_len": self._engine.limits.context,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def model_info(self, http: web.Request) -> web.Response:
        options, scheduler = self._engine.options, self._engine.scheduler
        return _json(
            ModelInfo(
                model_path=str(options.model),
                weight_version=scheduler.version,
                served_model_name=options.model.name,
                model_type=scheduler.model.weights.shape.model_type,
            )
        )

    async def server_info(self, http: web.Request) -> web.Response:
        options, limits = self._engine.options, self._engine.limits
        return _json(
            ServerInfo(
                model_path=str(options.model),
                served_model_name=options.model.name,
                max_total_num_tokens=options.slots * limits.context,
                max_req_input_len=limits.context - 1,
                tp_size=options.ep,
                ep_size=options.ep,
                version=f"rl360-tiny {options.generation}",
                enable_return_routed_experts=options.routed_experts,
            )
        )

    async def load(self, http: web.Request) -> web.Response:
        s = self._engine.scheduler
        running, waiting = len(s.running), len(s.waiting)
        return _json([Load(dp_rank=0, num_reqs=running + waiting, num_waiting_reqs=waiting, num_tokens=s.slots.rows)])

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=render(self._engine.scheduler, self._engine.options.generation), content_type="text/plain")


def _json(body: msgspec.Struct | list[Load] | GenerateReply, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(body), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json(ErrorReply(error=ErrorBody(message=message)), status)


async def _send(http: web.Request, response: web.StreamResponse, data: bytes) -> None:
    if not response.prepared:
        await response.prepare(http)
    await response.write(b"data: " + data + b"\n\n")
