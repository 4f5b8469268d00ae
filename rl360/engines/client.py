"""Control calls to one engine: each has a deadline and ends in a typed reply or an `EngineError`."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import aiohttp
import msgspec

from rl360.bus.events import Boundary, Cause
from rl360.engines import contract as c
from rl360.engines.dialect import Dialect, DialectError, dialect_of
from rl360.errors import InputError

T = TypeVar("T")


class EngineError(InputError):
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
    """One engine generation, as its worker and the pusher drive it."""

    def __init__(self, http: aiohttp.ClientSession, url: str, generation: str, *, timeout: float) -> None:
        super().__init__(http, url, boundary=Boundary.ENGINE, timeout=timeout, generation=generation)

    async def healthy(self) -> bool:
        """Whether it serves yet."""
        try:
            await self.call("GET", "/health", bytes)
        except EngineError:
            return False
        return True

    async def server_info(self, *, timeout: float | None = None) -> c.ServerInfo:
        """What it is. The part that samples answers, paused or not: it tells an engine that hangs from one that lost its peers."""
        return await self.call("GET", "/server_info", c.ServerInfo, timeout=timeout)

    async def dialect(self) -> Dialect:
        """How to drive it. Raises EngineError for a server that can't be driven, too."""
        info = await self.server_info()
        try:
            return dialect_of(info)
        except DialectError as e:
            raise self.refused(str(e)) from None

    async def model_info(self) -> c.ModelInfo:
        return await self.call("GET", "/model_info", c.ModelInfo)

    async def generate(self, request: c.GenerateRequest, *, timeout: float | None = None) -> c.GenerateReply:
        return await self.call("POST", "/generate", c.GenerateReply, request, timeout=timeout)

    async def abort(self, rid: str) -> None:
        """End every request whose id starts with `rid`; each is answered with what it has. No such request is no error."""
        await self.call("POST", "/abort_request", bytes, c.AbortRequest(rid=rid))

    async def flush(self) -> None:
        """Forget all cached KV. Refused while requests hold some."""
        await self.call("POST", "/flush_cache", bytes)

    async def pause(self, mode: c.PauseMode) -> None:
        """Stop sampling; new requests are held until `resume`."""
        await self.call("POST", "/pause_generation", bytes, c.PauseRequest(mode=mode))

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

    async def receive_experts(self, request: c.UpdateExperts) -> None:
        """Take the experts that the trainer's ranks send to this engine's GPUs."""
        await self._done("/update_experts_from_ranks", request)

    async def map_tensors(self, request: c.UpdateFromTensor) -> None:
        """Load tensors from memory that the caller shares; it must live until this returns."""
        await self._done("/update_weights_from_tensor", request)

    async def label(self, version: str) -> None:
        """Name what is held. Requests in flight are never aborted for a label (CASES 29)."""
        await self._done("/update_weight_version", c.UpdateWeightVersion(new_version=version))

    async def checksums(self) -> list[dict[str, str]]:
        """Checksum of every weight that the engine holds, by name, for each of its ranks."""
        reply = await self.call("POST", "/weights_checker", c.ChecksumReply, c.ChecksumRequest(action="checksum"))
        if not reply.success or not reply.ranks:
            raise self._error(Cause.REFUSED, f"/weights_checker: {reply.message or 'no ranks'}")
        return [rank.checksums for rank in reply.ranks]

    def refused(self, why: str) -> EngineError:
        """An engine that answers, but not as it is needed."""
        return self._error(Cause.REFUSED, why)

    async def _done(self, path: str, body: Any, *, timeout: float | None = None) -> None:
        reply = await self.call("POST", path, c.Done, body, timeout=timeout)
        if not reply.success:
            raise self._error(Cause.REFUSED, f"POST {path}: {reply.message}")


def _head(content: bytes) -> str:
    return content[:300].decode(errors="replace")
