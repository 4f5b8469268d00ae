"""Control calls to one engine: each has a deadline and ends in a typed reply or an `EngineError`."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import aiohttp
import msgspec

from rl360.bus.events import Boundary, Cause
from rl360.engines import contract as c

T = TypeVar("T")


class EngineError(Exception):
    """A call to an engine or to the gateway failed (S13): where, why, and for which generation.

    `cause` is LOST (the connection went away), TIMEOUT (no reply in time), REFUSED (an error reply) or UNKNOWN (a
    reply that is not the contract's). `status` is the HTTP status when there was one.
    """

    def __init__(self, boundary: Boundary, cause: Cause, detail: str, *, generation: str = "", status: int | None = None) -> None:
        who = f"{boundary} {generation}".strip()
        super().__init__(f"{who}: {cause}: {detail}")
        self.boundary, self.cause, self.detail, self.generation, self.status = boundary, cause, detail, generation, status


class Endpoint:
    """HTTP calls to one base URL. A call ends within `timeout` seconds, whatever the peer does."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, boundary: Boundary, timeout: float, generation: str = "") -> None:
        self.url, self.generation = url.rstrip("/"), generation
        self._http, self._boundary, self._timeout = http, boundary, timeout

    async def call(self, method: str, path: str, reply: type[T], body: Any = None, *, timeout: float | None = None) -> T:
        """Send `body` as JSON and decode the reply as `reply` (`bytes`: as it came). Raises EngineError."""
        limit = self._timeout if timeout is None else timeout
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with self._http.request(
                method, self.url + path, data=data, headers=headers, timeout=aiohttp.ClientTimeout(total=limit)
            ) as response:
                status, content = response.status, await response.read()
        except TimeoutError:
            raise self._error(Cause.TIMEOUT, f"{method} {path}: no reply within {limit:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as e:
            raise self._error(Cause.LOST, f"{method} {path}: {type(e).__name__}: {e}") from None
        if status >= 400:
            raise self._error(Cause.REFUSED, f"{method} {path}: HTTP {status}: {_head(content)}", status)
        return self._decode(reply, content, f"{method} {path}")

    def _decode(self, reply: type[T], content: bytes, what: str) -> T:
        if reply is bytes:
            return cast(T, content)
        try:
            return msgspec.json.decode(content, type=reply)
        except msgspec.DecodeError as e:
            raise self._error(Cause.UNKNOWN, f"{what}: not the contract's reply ({e}): {_head(content)}") from None

    def _error(self, cause: Cause, detail: str, status: int | None = None) -> EngineError:
        return EngineError(self._boundary, cause, detail, generation=self.generation, status=status)


class EngineClient(Endpoint):
    """One engine generation, as the pusher drives it."""

    def __init__(self, http: aiohttp.ClientSession, url: str, generation: str, *, timeout: float) -> None:
        super().__init__(http, url, boundary=Boundary.ENGINE, timeout=timeout, generation=generation)

    async def model_info(self, *, timeout: float | None = None) -> c.ModelInfo:
        """Answers while paused too: also the probe that tells a dead engine from one that lost its peers."""
        return await self.call("GET", "/model_info", c.ModelInfo, timeout=timeout)

    async def pause(self) -> None:
        """Freeze generation in place: requests in flight keep their KV, new ones are held."""
        await self.call("POST", "/pause_generation", bytes, c.PauseRequest(mode="in_place"))

    async def resume(self, *, timeout: float | None = None) -> None:
        await self.call("POST", "/continue_generation", bytes, {}, timeout=timeout)

    async def begin_update(self) -> None:
        await self._done("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self._done("/end_weight_update", {})

    async def join_group(self, request: c.InitWeightsGroup) -> None:
        """Returns when the group is complete: call it on all engines at once, while the trainer joins."""
        await self._done("/init_weights_update_group", request)

    async def leave_group(self, name: str, *, timeout: float) -> None:
        await self._done("/destroy_weights_update_group", c.DestroyWeightsGroup(group_name=name), timeout=timeout)

    async def receive(self, request: c.UpdateFromDistributed) -> None:
        """Take part in the broadcast of one bucket and load it."""
        await self._done("/update_weights_from_distributed", request)

    async def set_version(self, version: int) -> None:
        """Label what is held. Requests in flight are never aborted for a label (CASES 29)."""
        await self._done("/update_weight_version", c.UpdateWeightVersion(new_version=str(version)))

    async def checksums(self) -> dict[str, str]:
        """Checksum of every weight that the engine holds, by name."""
        reply = await self.call("POST", "/weights_checker", c.ChecksumReply, {"action": "checksum"})
        if not reply.success or len(reply.ranks) != 1:
            raise self._error(Cause.REFUSED, f"/weights_checker: {reply.message} ({len(reply.ranks)} ranks, 1 expected)")
        return reply.ranks[0].checksums

    async def _done(self, path: str, body: Any, *, timeout: float | None = None) -> None:
        reply = await self.call("POST", path, c.Done, body, timeout=timeout)
        if not reply.success:
            raise self._error(Cause.REFUSED, f"POST {path}: {reply.message}")


def _head(content: bytes) -> str:
    return content[:300].decode(errors="replace")
