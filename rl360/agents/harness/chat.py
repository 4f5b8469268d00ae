"""A small OpenAI chat client for one session: one kept connection, retries under one request id within a deadline.

It is plain http.client, so that a turn costs a fraction of a millisecond, and it can be cancelled from another thread.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from rl360.agents.outcomes import InfraError
from rl360.bus.events import Boundary, Cause

_PAUSES: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 2.0)
_RETRIED: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_REPLY: Final = 32 << 20


class Cancelled(Exception):
    """The agent's clock ran out while it waited."""


class SessionEnded(Exception):
    """The session takes no further turns (S7). `reason`: length | context | closed | turns."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"session_ended: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Fault:
    """What an error reply of the session server says about itself."""

    code: str
    reason: str
    message: str
    boundary: Boundary
    cause: Cause
    exception: str

    @classmethod
    def read(cls, status: int, body: bytes) -> Fault:
        """OpenAI's error body, with `boundary` and `cause` where the server knew them (S13)."""
        error: dict[str, Any] = {}
        try:
            parsed: object = msgspec.json.decode(body)
            if isinstance(parsed, dict):
                error = cast(dict[str, Any], cast(dict[str, Any], parsed).get("error") or {})
        except (msgspec.DecodeError, UnicodeDecodeError):
            error = {"message": body[:300].decode(errors="replace")}
        known = {b.value for b in Boundary}, {c.value for c in Cause}
        boundary, cause = str(error.get("boundary")), str(error.get("cause"))
        default = Cause.LOST if status >= 500 or status == 404 else Cause.REFUSED
        return cls(
            code=str(error.get("code") or ""),
            reason=str(error.get("reason") or ""),
            message=f"HTTP {status}: {error.get('message') or 'no reason given'}",
            boundary=Boundary(boundary) if boundary in known[0] else Boundary.SESSION,
            cause=Cause(cause) if cause in known[1] else default,
            exception=str(error.get("exception") or f"HTTP{status}"),
        )

    @property
    def ended(self) -> str:
        """Why the session takes no further turn: length, context or closed; "" when that isn't what is said."""
        return (self.reason or "closed") if self.code == "session_ended" else ""

    def error(self) -> InfraError:
        return InfraError(self.boundary, self.cause, self.message, exception=self.exception)


class ChatClient:
    """Chat completions of one session until `deadline` (unix seconds)."""

    def __init__(self, base_url: str, key: str, *, session: str, deadline: float, traceparent: str = "") -> None:
        url = urlsplit(base_url)
        assert url.hostname is not None
        self._connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = url.hostname, url.port or self._connect.default_port
        self._path = f"{url.path.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        if traceparent:
            self._headers["traceparent"] = traceparent
        self._session, self._deadline = session, deadline
        self._connection: http.client.HTTPConnection | None = None
        self._cancelled = threading.Event()
        self._calls = 0

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One logical call: the same `x-request-id` on every try, so the server answers it once (S5).

        Raises SessionEnded; Cancelled when the deadline comes while the call waits; InfraError when the call failed
        and the deadline came before it could be mended, or when no retry can help.
        """
        self._calls += 1
        headers = {**self._headers, "x-request-id": f"{self._session}-{self._calls}"}
        data = msgspec.json.encode(body)
        last: InfraError | None = None
        tries = 0
        while True:
            try:
                status, reply = self._send(data, headers)
            except (OSError, http.client.HTTPException) as e:
                self._drop()
                if self._over:
                    raise last or Cancelled() from None
                last = InfraError(Boundary.SESSION, _cause(e), f"{type(e).__name__}: {e}", exception=type(e).__name__)
            else:
                if status == 200:
                    return _decoded(reply)
                last = self._refused(status, reply)
            if self._cancelled.wait(min(_PAUSES[min(tries, len(_PAUSES) - 1)], self._left)) or self._over:
                raise last
            tries += 1

    def cancel(self) -> None:
        """End the call in flight, and refuse later ones. From any thread."""
        self._cancelled.set()
        connection = self._connection
        sock = connection.sock if connection else None
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it was closed already

    def close(self) -> None:
        self._drop()

    @property
    def _left(self) -> float:
        return max(0.0, self._deadline - time.time())

    @property
    def _over(self) -> bool:
        return self._cancelled.is_set() or self._left == 0.0

    def _send(self, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._over:
            raise TimeoutError("the agent's deadline has passed")
        if self._connection is None:
            self._connection = self._connect(self._host, self._port, timeout=self._left)
            self._connection.connect()
            assert self._connection.sock is not None
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert self._connection.sock is not None
        self._connection.sock.settimeout(self._left or 0.001)
        self._connection.request("POST", self._path, body=data, headers=headers)
        response = self._connection.getresponse()
        reply = response.read(MAX_REPLY + 1)
        if len(reply) > MAX_REPLY:
            raise http.client.HTTPException(f"a reply of more than {MAX_REPLY >> 20} MiB")
        if response.will_close:
            self._drop()
        return response.status, reply

    def _refused(self, status: int, reply: bytes) -> InfraError:
        """The error to retry on; raises the ones that a retry can't mend."""
        fault = Fault.read(status, reply)
        if fault.ended:
            raise SessionEnded(fault.ended)
        if status not in _RETRIED:
            raise fault.error()
        return fault.error()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _cause(error: Exception) -> Cause:
    return Cause.REFUSED if isinstance(error, ConnectionRefusedError) else Cause.LOST


def _decoded(reply: bytes) -> dict[str, Any]:
    try:
        parsed: object = msgspec.json.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InfraError(Boundary.SESSION, Cause.UNKNOWN, f"a reply that is no JSON: {e}", exception=type(e).__name__) from e
    if not isinstance(parsed, dict) or not parsed.get("choices"):  # pyright: ignore[reportUnknownMemberType]
        raise InfraError(Boundary.SESSION, Cause.UNKNOWN, f"a reply without choices: {reply[:200]!r}", exception="BadReply")
    return cast(dict[str, Any], parsed)
