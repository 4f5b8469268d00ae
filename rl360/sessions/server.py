"""The session server: an OpenAI-compatible API for one attempt's agent, and `POST /sessions` for runners."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from rl360.bus.connection import BusError
from rl360.bus.events import Boundary, Cause, SessionClosed
from rl360.sessions import answers, bodies
from rl360.sessions.client import ClosedSession, OpenedSession, OpenSession
from rl360.sessions.crowd import Crowd
from rl360.sessions.door import error, http_error
from rl360.sessions.generate import EngineFault
from rl360.sessions.metrics import Metrics
from rl360.sessions.names import parse_session, session_key
from rl360.sessions.requests import RequestError
from rl360.sessions.store import NotFound, Store
from rl360.sessions.turning import Turns
from rl360.sessions.turns import Ended
from rl360.sessions.unreadable import reason

_JSON: Final = "application/json"

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Reason(msgspec.Struct):
    reason: str = "closed"


class SessionServer:
    """Routes and their access checks; all state is in `store`, all work in `turns`. `url`: where agents reach this server."""

    def __init__(self, store: Store, turns: Turns, metrics: Metrics, *, admin: str, url: str, max_body: int, log: logging.Logger) -> None:
        self._store, self._turns, self._metrics, self._log = store, turns, metrics, log
        self._admin, self._url = admin, url.rstrip("/")
        self._created = int(time.time())
        self._crowd = Crowd()
        self.app = web.Application(client_max_size=max_body, middlewares=[self._errors])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.post("/sessions", self._open),
                web.get("/sessions/{id}", self._status),
                web.delete("/sessions/{id}", self._close),
                web.get("/sessions/{id}/v1/models", self._models),
                web.post("/sessions/{id}/v1/chat/completions", self._chat),
            ]
        )

    # ------------------------------------------------------------------------------------------------ agents

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._own_session(request)
        request_id = bodies.request_id(request)
        with self._crowd.place(session):
            data = await bodies.read(request)
            turn, incoming = await self._turns.take(await self._store.get(session), data, request_id)
        headers = {"x-request-id": turn.request_id}
        if not incoming.stream:
            return web.Response(body=answers.completion(session, turn), content_type=_JSON, headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(b"".join(answers.stream(session, turn, include_usage=incoming.include_usage)))
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._own_session(request)
        return web.Response(body=answers.models(self._created), content_type=_JSON)

    # ------------------------------------------------------------------------------------------------ runners

    async def _open(self, request: web.Request) -> web.Response:
        self._check_admin(request)
        body = _decode(await bodies.read(request), OpenSession)
        name = parse_session(body.session)
        if name is None or (name.attempt, name.step, name.group) != (body.attempt, body.step, body.group):
            raise RequestError(400, "invalid_session", f"session {body.session!r} is not a session of attempt {body.attempt!r}", "session")
        await self._store.open(name, body.min_version)
        key = session_key(self._admin, name.session)
        return _reply(OpenedSession(session=name.session, base_url=f"{self._url}/sessions/{name.session}/v1", key=key))

    async def _close(self, request: web.Request) -> web.Response:
        self._check_admin(request)
        data = await bodies.read(request)
        why = request.query.get("reason") or (_decode(data, _Reason) if data else _Reason()).reason
        return _reply(_closed(await self._store.close(request.match_info["id"], why)))

    async def _status(self, request: web.Request) -> web.Response:
        session = self._own_session(request, admin_too=True)
        try:
            live = await self._store.get(session)
            live.check_open()
            ended = ""
        except Ended as e:
            return _reply({"session": session, "ended": e.reason, "detail": str(e)})
        tree = live.tree
        last = tree.turns[-1] if tree.turns else None
        return _reply(
            {
                "session": session,
                "ended": ended,
                "turns": len(tree.turns),
                "branches": tree.branches,
                "tokens": last.total if last else 0,
            }
        )

    async def _health(self, _: web.Request) -> web.Response:
        return _reply({"status": "ok", "sessions": len(self._store)})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._metrics.text(open_sessions=len(self._store)))

    # ------------------------------------------------------------------------------------------------ access

    def _own_session(self, request: web.Request, *, admin_too: bool = False) -> str:
        session, given = request.match_info["id"], _bearer(request)
        if not given:
            raise RequestError(401, "missing_key", "send this session's key: Authorization: Bearer <key>")
        allowed = [session_key(self._admin, session), *([self._admin] if admin_too else [])]
        if not any(_same(given, key) for key in allowed):
            raise RequestError(403, "wrong_key", f"this key doesn't open session {session!r}")
        return session

    def _check_admin(self, request: web.Request) -> None:
        given = _bearer(request)
        if not given:
            raise RequestError(401, "missing_key", "send the administrator's key: Authorization: Bearer <key>")
        if not _same(given, self._admin):
            raise RequestError(403, "wrong_key", "only the administrator's key opens and closes sessions")

    # ------------------------------------------------------------------------------------------------ errors

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every failure becomes one OpenAI error; what is a runner's business has boundary and cause (S13)."""
        try:
            return await handler(request)
        except RequestError as e:
            return error(e.status, e.code, e.message, param=e.param)
        except Ended as e:
            return error(404, "session_ended", str(e), reason=e.reason)
        except NotFound as e:
            return error(404, "session_not_found", str(e))
        except EngineFault as e:
            self._log.warning("%s: %s/%s: %s", request.path, e.boundary, e.cause, e.detail)
            return error(e.status, f"{e.boundary}_{e.cause}", e.detail, boundary=e.boundary, cause=e.cause, exception=e.exception)
        except (BusError, TimeoutError) as e:
            self._log.warning("%s: %s: %s", request.path, type(e).__name__, e)
            return error(503, "bus_lost", str(e), boundary=Boundary.BUS, cause=Cause.LOST, exception=type(e).__name__)
        except web.HTTPException as e:
            return http_error(e)
        except Exception as e:  # noqa: BLE001  (the one boundary: counted as unknown, never answered as a reply)
            self._log.exception("%s failed", request.path)
            detail = f"{type(e).__name__}: {e}"
            return error(500, "internal", detail, boundary=Boundary.SESSION, cause=Cause.UNKNOWN, exception=type(e).__name__)


def _bearer(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _same(given: str, key: str) -> bool:
    """In constant time. A header's bytes that are no UTF-8 arrive as surrogates."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), key.encode())


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise RequestError(400, "invalid_request", f"request body: {reason(data, e)}") from None


def _reply(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=_JSON)


def _closed(event: SessionClosed) -> ClosedSession:
    return ClosedSession(session=event.session, reason=event.reason, turns=event.turns, branches=event.branches)
