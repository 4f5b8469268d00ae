"""The only network of an external agent: a listener on the sandbox's loopback that leads to its session's URL."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from typing import Final, Self

import aiohttp
from aiohttp import web

from rl360.agents.harness import gate
from rl360.agents.harness.base import Assignment
from rl360.agents.harness.chat import Fault
from rl360.agents.outcomes import InfraError
from rl360.bus.events import Boundary, Cause

_PASSED: Final = ("content-type", "accept", "x-request-id")
_MAX_BODY: Final = 32 << 20
_BODIES: Final = 4
"""Requests of one agent whose bodies are in memory at once; the others wait unread."""
_REFUSED_SECONDS: Final = 0.05  # for which a refusal keeps its place among them: asking for what isn't there is no way to keep us busy
_PAUSE: Final = 0.5
_JSON: Final = "application/json"


class Relay:
    """Serves /v1/... on a listening socket and passes it on to the session, with the session's key. Nothing else is there.

    `ended` is why the session refused a turn ("" while it does not), `fault` the last failure that no retry mended, `refused`
    the error of a request that the session took for a wrong one. A turn that succeeds clears both.
    """

    def __init__(self, given: Assignment, listener: socket.socket) -> None:
        self._given, self._listener = given, listener
        self._numbers = itertools.count(1)
        self._bodies, self._turn = asyncio.Semaphore(_BODIES), asyncio.Lock()
        self._models: bytes | None = None  # what /v1/models said: asked for once
        self.turns = 0
        self.ended = ""
        self.fault: InfraError | None = None
        self.refused: InfraError | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/v1/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        assert self._runner.server is not None
        self._serving = asyncio.create_task(gate.serve(self._runner.server, self._listener))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._serving.cancel()
        await self._runner.cleanup()
        await self._http.close()
        self._listener.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        async with self._bodies:
            try:
                return await self._serve_next(request)
            except web.HTTPException:
                await asyncio.sleep(_REFUSED_SECONDS)
                raise

    async def _serve_next(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        if ".." in path or path not in ("chat/completions", "models"):
            raise web.HTTPNotFound(text="only /v1/chat/completions and /v1/models are here")
        if path == "chat/completions":
            if self.turns >= self._given.config.max_turns:
                self.ended = "turns"
                raise web.HTTPTooManyRequests(text=f"agent.max_turns = {self.turns} model calls were made")
            self.turns += 1
        elif self._models is not None:
            return web.Response(body=self._models, headers={"content-type": _JSON})
        body = await request.read()
        async with self._turn:  # a session takes one turn at a time: who asks twice at once must not run into its patience
            return await self._pass_on(request, path, body)

    async def _pass_on(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        headers = {h: request.headers[h] for h in _PASSED if h in request.headers}
        headers.setdefault("x-request-id", f"{self._given.session}-relay-{next(self._numbers)}")
        headers |= {"authorization": f"Bearer {self._given.key}", "traceparent": self._given.traceparent}
        url = f"{self._given.base_url.rstrip('/')}/{path}"
        while True:
            try:
                async with self._http.request(request.method, url, data=body, headers=headers, timeout=self._timeout()) as reply:
                    said = await reply.read()  # whole: an agent that hangs up on us is no failure of the session's
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as e:
                self._failed(InfraError(Boundary.SESSION, Cause.LOST, str(e), exception=type(e).__name__))
            else:
                if reply.status < 500 or self._left() < _PAUSE:
                    return self._answer(path, reply, said)
                self._failed(Fault.read(reply.status, said).error())
            if self._left() < _PAUSE:
                raise web.HTTPBadGateway(text="the session can't be reached")
            await asyncio.sleep(_PAUSE)

    def _answer(self, path: str, reply: aiohttp.ClientResponse, said: bytes) -> web.Response:
        if reply.status == 200:
            self.fault = self.refused = None
            self._models = said if path == "models" else self._models
        else:
            fault = Fault.read(reply.status, said)
            self.ended = fault.ended or self.ended
            self.refused = None if fault.ended else fault.error()
        return web.Response(body=said, status=reply.status, headers={"content-type": reply.headers.get("content-type", _JSON)})

    def _failed(self, error: InfraError) -> None:
        self.fault = error

    def _left(self) -> float:
        return max(0.0, self._given.deadline - time.time())

    def _timeout(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=max(0.001, self._left()))
