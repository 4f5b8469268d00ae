"""What a runner asks of a session server: open a session, close it."""

from __future__ import annotations

import asyncio
import time
from typing import Final, TypeVar

import aiohttp
import msgspec

T = TypeVar("T")

_PAUSE: Final = 0.2


class SessionError(Exception):
    """A session server did not do what was asked. `status` 0: it could not be reached in time."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /sessions`. `min_version`: no token of the session may be sampled by an older policy (S24)."""

    attempt: str
    group: int
    step: int
    session: str
    min_version: int = 0


class OpenedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent finds its session, and the key that opens it alone."""

    session: str
    base_url: str
    key: str


class ClosedSession(msgspec.Struct, frozen=True, kw_only=True):
    """What a closed session came to. `ended`: length, context, or empty when the agent could have gone on."""

    session: str
    reason: str
    turns: int
    branches: int


class SessionClient:
    """Calls one session server as its administrator. A server that is restarting is asked again until `seconds` are over."""

    def __init__(self, http: aiohttp.ClientSession, url: str, admin: str, *, seconds: float = 30.0) -> None:
        self._http, self._url, self._seconds = http, url.rstrip("/"), seconds
        self._headers = {"Authorization": f"Bearer {admin}", "Content-Type": "application/json"}

    async def open(self, request: OpenSession) -> OpenedSession:
        """Open a session (again: the same one). Raises SessionError."""
        return await self._call("POST", "/sessions", OpenedSession, msgspec.json.encode(request))

    async def close(self, session: str, reason: str) -> ClosedSession:
        """Close a session for good (again: no change). Raises SessionError."""
        return await self._call("DELETE", f"/sessions/{session}", ClosedSession, msgspec.json.encode({"reason": reason}))

    async def _call(self, method: str, path: str, reply: type[T], body: bytes) -> T:
        end = time.monotonic() + self._seconds
        while True:
            try:
                return await self._once(method, path, reply, body, end - time.monotonic())
            except SessionError as e:
                if (e.status and e.status != 503) or time.monotonic() + _PAUSE >= end:
                    raise
            await asyncio.sleep(_PAUSE)

    async def _once(self, method: str, path: str, reply: type[T], body: bytes, seconds: float) -> T:
        timeout = aiohttp.ClientTimeout(total=max(seconds, 0.01))
        try:
            async with self._http.request(method, self._url + path, data=body, headers=self._headers, timeout=timeout) as response:
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as e:
            raise SessionError(0, f"{method} {self._url}{path}: {type(e).__name__}: {e}") from None
        if status != 200:
            raise SessionError(status, f"{method} {self._url}{path}: HTTP {status}: {content[:300].decode(errors='replace')}")
        try:
            return msgspec.json.decode(content, type=reply)
        except msgspec.MsgspecError as e:
            raise SessionError(status, f"{method} {self._url}{path}: {e}") from None
