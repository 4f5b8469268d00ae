"""Connections of a session server: what fails outside a handler is answered as OpenAI's error too, never as plain text."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.web_request import BaseRequest

from rl360.bus.events import Boundary, Cause
from rl360.sessions import answers

_CODES: Final = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 417: "expectation_failed"}
_SHOWN: Final = 300


class Door(web.RequestHandler):
    """One connection. aiohttp answers in plain text what it can't parse and what fails before or after the handler."""

    __slots__ = ()

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500 or request.writer.output_size > 0:
            super().handle_error(request, status, exc, message)  # logs it; raises when part of an answer is sent already
            response = error(
                status,
                "internal",
                f"{type(exc).__name__}: {exc}",
                boundary=Boundary.SESSION,
                cause=Cause.UNKNOWN,
                exception=type(exc).__name__,
            )
        else:
            response = error(status, "invalid_http", f"not a request that HTTP allows: {' '.join((message or str(exc)).split())}"[:_SHOWN])
        response.force_close()
        return response

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        return await super().finish_response(request, http_error(resp) if isinstance(resp, web.HTTPException) else resp, start_time)


def error(status: int, code: str, message: str, *, param: str = "", **more: str) -> web.Response:
    """OpenAI's error as a response."""
    body = answers.error(status, code, message, param=param, **more)
    return web.Response(status=status, body=body, content_type="application/json")


def http_error(e: web.HTTPException) -> web.Response:
    """aiohttp's own refusals: an unknown path or method, a body that is too big, an unknown expectation."""
    return error(e.status, _CODES.get(e.status, "http_error"), e.text or e.reason)


async def listen(runner: web.AppRunner, url: str) -> asyncio.Server:
    """Accept connections at `url` for a runner that is set up. Bodies come as they were sent: `bodies.read` unpacks them."""
    loop, server, place = asyncio.get_running_loop(), runner.server, urlsplit(url)
    assert server is not None
    assert place.port is not None

    def connection() -> Door:
        return Door(server, loop=loop, access_log=None, auto_decompress=False)  # pyright: ignore[reportArgumentType]  (None: no access log)

    return await loop.create_server(connection, place.hostname, place.port, backlog=1024)
