"""A server that answers from recorded exchanges, matched by path and by what the body asks for.

It knows nothing else: a request that was not recorded is answered 501 with the body, so that a test can't pass by chance.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from rl360.engines import contract as c
from rl360.engines.client import EngineClient

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang"
_LONG = 1000  # tokens of a request that is there to be cut off: how many differs from recording to recording


class Replay:
    def __init__(self, version: str) -> None:
        self._exchanges: list[dict[str, Any]] = list(json.loads((FIXTURES / f"{version}.json").read_text()).values())

    async def answer(self, request: web.Request) -> web.Response:
        data = await request.read()
        asked = meaning(request.path, json.loads(data) if data else None)
        for exchange in self._exchanges:
            if (exchange["method"], exchange["path"]) != (request.method, request.path):
                continue
            if meaning(request.path, exchange.get("request")) == asked:
                body = json.dumps(exchange["reply"]).encode() if "reply" in exchange else b""
                return web.Response(body=body, status=exchange["status"], content_type=exchange["content_type"] or "text/plain")
        return web.Response(status=501, text=f"not recorded: {request.method} {request.path} {asked}")


def meaning(path: str, body: Any) -> Any:
    """What a body asks for: defaults count as if they were spelled out, the name of a request doesn't count."""
    if path == "/abort_request":
        return msgspec.convert(body, c.AbortRequest)
    if path != "/generate":
        return body or {}
    asked = msgspec.convert(body, c.GenerateRequest, strict=False)
    params = asked.sampling_params
    params = msgspec.structs.replace(params, max_new_tokens=min(params.max_new_tokens, _LONG))
    return msgspec.structs.replace(asked, sampling_params=params, rid="")


@asynccontextmanager
async def replay_server(version: str) -> AsyncIterator[EngineClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", Replay(version).answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as http:
            yield EngineClient(http, f"http://127.0.0.1:{port}", f"recorded-{version}", timeout=10)
    finally:
        await runner.cleanup()
