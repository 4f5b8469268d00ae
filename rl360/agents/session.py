"""The runner's side of a session: open it before the agent starts, close it when the agent is dead."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Final

import aiohttp

from rl360.agents.outcomes import InfraError
from rl360.bus.events import Boundary, Cause, RolloutAdmitted
from rl360.sessions.client import OpenedSession, OpenSession, SessionClient, SessionError

_CAUSES: Final = {0: Cause.LOST, 404: Cause.LOST, 503: Cause.LOST, 507: Cause.DISK_FULL}


class Sessions:
    """Opens and closes sessions on the run's session servers. Use as an async context manager."""

    def __init__(self, servers: Sequence[str], admin: str) -> None:
        self._servers, self._admin = tuple(servers), admin

    async def __aenter__(self) -> Sessions:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def open(self, admitted: RolloutAdmitted, session: str, *, deadline: float) -> OpenedSession:
        """Open it (again: the same one), trying until `deadline` (unix seconds). Raises InfraError."""
        request = OpenSession(attempt=admitted.attempt, group=admitted.group, step=admitted.step, session=session)
        try:
            return await self._client(session, deadline).open(request)
        except SessionError as e:
            raise _typed(e) from e

    async def close(self, session: str, reason: str, *, deadline: float) -> None:
        """Close it: its turns are complete in the journal once this returns. Raises InfraError."""
        try:
            await self._client(session, deadline).close(session, reason)
        except SessionError as e:
            raise _typed(e) from e

    def _client(self, session: str, deadline: float) -> SessionClient:
        """The server of a session follows from its name, so a restarted runner asks the same one."""
        server = self._servers[zlib.crc32(session.encode()) % len(self._servers)]
        return SessionClient(self._http, server, self._admin, seconds=max(0.0, deadline - time.time()))


def _typed(error: SessionError) -> InfraError:
    cause = _CAUSES.get(error.status, Cause.UNKNOWN if error.status >= 500 else Cause.REFUSED)
    return InfraError(Boundary.SESSION, cause, error.detail, exception=f"SessionError{error.status or ''}")
