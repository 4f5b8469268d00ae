"""The runner's side of a session: open it before the agent starts, close it when the agent is dead."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec

from rl360.agents.harness.chat import Fault
from rl360.agents.outcomes import InfraError, cause_of
from rl360.bus.events import Boundary, Cause

_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 2.0


class Session(msgspec.Struct, frozen=True):
    """An open session: where its agent talks to, and with which key. `server` is the session server's URL."""

    session: str
    base_url: str
    key: str
    server: str = ""


class Sessions:
    """Opens and closes sessions on the run's session servers. Use as an async context manager."""

    def __init__(self, servers: Sequence[str], admin: str) -> None:
        self._servers, self._admin = tuple(servers), admin

    async def __aenter__(self) -> Sessions:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def open(self, session: str, *, deadline: float, traceparent: str) -> Session:
        """Open it; the same session opened again is the same. Raises InfraError; `deadline` in unix seconds."""
        server = self._servers[zlib.crc32(session.encode()) % len(self._servers)]
        reply = await self._call("POST", f"{server}/sessions", deadline, traceparent, {"session": session})
        try:
            opened = msgspec.json.decode(reply, type=Session)
        except msgspec.DecodeError as e:
            raise InfraError(Boundary.SESSION, Cause.UNKNOWN, f"{server}/sessions: not a session: {e}", exception=type(e).__name__) from e
        return Session(opened.session, opened.base_url, opened.key, server)

    async def close(self, session: Session, *, deadline: float, traceparent: str) -> None:
        """Close it: its turns are complete in the journal once this returns. Raises InfraError."""
        await self._call("DELETE", f"{session.server}/sessions/{session.session}", deadline, traceparent, None)

    async def _call(self, method: str, url: str, deadline: float, traceparent: str, body: dict[str, Any] | None) -> bytes:
        """Until it succeeds, a retry can't help, or the deadline comes: a session server may be away for some seconds."""
        headers = {"Authorization": f"Bearer {self._admin}", "traceparent": traceparent}
        pause = _PAUSE
        while True:
            left = deadline - time.time()
            try:
                timeout = aiohttp.ClientTimeout(total=max(0.001, left))
                async with self._http.request(method, url, json=body, headers=headers, timeout=timeout) as reply:
                    data = await reply.read()
                    if reply.status < 300:
                        return data
                    error, final = Fault.read(reply.status, data).error(), reply.status < 500 and reply.status != 429
            except (aiohttp.ClientError, TimeoutError) as e:
                # aiohttp's own connection errors are OSErrors; a server that hung up is lost.
                cause = cause_of(e) if isinstance(e, OSError) else Cause.LOST
                error, final = InfraError(Boundary.SESSION, cause, f"{method} {url}: {e}", exception=type(e).__name__), False
            if final or time.time() + pause >= deadline:
                raise error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
