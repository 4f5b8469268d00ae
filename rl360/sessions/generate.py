"""Model calls: one request to an engine through the gateway, sent again under the same id until it is answered or time is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import aiohttp
import msgspec

from rl360.bus.events import Boundary, Cause
from rl360.config import Config
from rl360.engines.contract import GenerateRequest, SamplingParams
from rl360.sessions.fence import Fence
from rl360.sessions.offload import BIG, off_loop
from rl360.sessions.sampled import EngineReply, Refused, parse, rest

T = TypeVar("T")

_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0
_CONNECT: Final = 5.0
_EMPTY_IDS: Final = b'{"input_ids":[]'


class EngineFault(Exception):
    """A model call that failed for good (S13). `status` is for the agent: 504 when time ran out, else 502."""

    def __init__(self, boundary: Boundary, cause: Cause, exception: str, detail: str, *, status: int = 0, refused: int = 0) -> None:
        super().__init__(detail)
        self.boundary, self.cause, self.exception, self.detail = boundary, cause, exception, detail
        self.status = status or (504 if cause is Cause.TIMEOUT else 502)
        self.refused = refused  # replies that came and were refused


class _Again(Exception):
    """This try failed; another one may not."""

    def __init__(self, fault: EngineFault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A reply, what its check made of it, the worker that the gateway chose, and how often the call was sent again."""

    value: T
    reply: EngineReply
    worker: str
    retries: int


def sampling(config: Config, stop_token_ids: list[int], room: int) -> SamplingParams:
    """Sampling parameters of the run, whatever the agent asked for (S3). `room`: tokens that still fit the context."""
    return SamplingParams(
        temperature=config.sampling.temperature,
        max_new_tokens=min(config.sampling.max_new_tokens, room),
        stop_token_ids=stop_token_ids,
        no_stop_trim=False,
    )


def body(ids: bytes, *, rid: str, params: SamplingParams, routed_from: int | None) -> bytes:
    """JSON of a `/generate` request. `ids` is a fragment already: tens of thousands of ids are not written out again each turn.

    The flags are the session server's (S3): log-probs and the prompt's echo always, expert rows from `routed_from` on when replay is on.
    """
    request = GenerateRequest(
        input_ids=[],
        sampling_params=params,
        rid=rid,
        return_logprob=True,
        return_prompt_token_ids=True,
        return_routed_experts=routed_from is not None,
        routed_experts_start_len=routed_from or 0,
    )
    text = msgspec.json.encode(request)
    assert text.startswith(_EMPTY_IDS)
    return b"".join((_EMPTY_IDS[:-1], ids, b"]", text[len(_EMPTY_IDS) :]))


class EngineClient:
    """`POST {gateway}/generate` with retries inside a deadline. Use as an async context manager."""

    def __init__(self, gateway: str, *, deadline: float, fence: Fence | None = None) -> None:
        self._fence = fence or Fence()
        self._url = f"{gateway.rstrip('/')}/generate"
        self.deadline = deadline

    async def __aenter__(self) -> EngineClient:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def call(
        self, body_of: Callable[[int], bytes], headers: Mapping[str, str], check: Callable[[EngineReply], T], *, prompt: bytes = b""
    ) -> Answer[T]:
        """Send `body_of(n)` until `check` accepts the reply. `prompt`: JSON ids, an echo equal to which need not be parsed.

        `n` counts the replies refused so far: a new request id after those, the same one while nothing was answered.
        Raises EngineFault when the deadline passes, or at once when another try can't help.
        """
        end = time.monotonic() + self.deadline
        pause, tries, refused = _FIRST_PAUSE, 0, 0
        while True:
            tries += 1
            try:
                content, worker = await self._send(body_of(refused), headers, end - time.monotonic())
                reply, value = await self._checked(content, prompt, check)
                return Answer(value, reply, worker, tries - 1)
            except _Again as again:
                refused += again.fault.refused
                if time.monotonic() + pause >= end:
                    raise self._given_up(again.fault, tries, refused) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _checked(self, content: bytes, prompt: bytes, check: Callable[[EngineReply], T]) -> tuple[EngineReply, T]:
        text = rest(content, prompt)
        return await off_loop(lambda t: self._read(t, content, check), text, size=len(text), limit=BIG)

    def _read(self, text: bytes, content: bytes, check: Callable[[EngineReply], T]) -> tuple[EngineReply, T]:
        try:
            reply = parse(text, content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            detail = f"the engine's reply is not the contract's: {e}"
            raise EngineFault(Boundary.ENGINE, Cause.UNKNOWN, type(e).__name__, detail, refused=1) from None
        try:
            if self._fence.refuses(reply.meta_info.generation):
                raise Refused(f"engine generation {reply.meta_info.generation} is fenced", again=True)
            return reply, check(reply)
        except Refused as e:
            fault = EngineFault(Boundary.ENGINE, Cause.LOST if e.again else Cause.REFUSED, "Refused", str(e), refused=1)
            raise (_Again(fault) if e.again else fault) from None

    def _given_up(self, last: EngineFault, tries: int, refused: int) -> EngineFault:
        """Time is up; the last failure says where and why."""
        detail = f"no usable reply within {self.deadline:g} s and {tries} tries; last: {last.detail}"
        return EngineFault(last.boundary, last.cause, last.exception, detail, refused=refused)

    async def _send(self, data: bytes, headers: Mapping[str, str], seconds: float) -> tuple[bytes, str]:
        timeout = aiohttp.ClientTimeout(total=max(seconds, 0.001), sock_connect=_CONNECT)
        try:
            async with self._http.post(self._url, data=data, headers=headers, timeout=timeout) as response:
                content = await response.read()
                status, worker = response.status, response.headers.get("x-smg-routed-worker-id", "")
        except aiohttp.ServerTimeoutError as e:
            raise _Again(EngineFault(Boundary.GATEWAY, Cause.LOST, type(e).__name__, "the gateway doesn't accept connections")) from None
        except TimeoutError as e:
            raise EngineFault(Boundary.ENGINE, Cause.TIMEOUT, type(e).__name__, f"no reply within {self.deadline:g} s") from None
        except aiohttp.ClientConnectorError as e:
            raise _Again(EngineFault(Boundary.GATEWAY, Cause.LOST, type(e).__name__, f"can't reach the gateway: {e}")) from None
        except aiohttp.ClientError as e:
            raise _Again(EngineFault(Boundary.GATEWAY, Cause.LOST, type(e).__name__, f"connection lost: {e}")) from None
        if status != 200:
            raise self._status(status, content)
        return content, worker

    def _status(self, status: int, content: bytes) -> Exception:
        """An error reply. 404 is the gateway's word for having no engine at the moment."""
        text = content[:300].decode(errors="replace")
        passing = status >= 500 or status in (404, 408, 429)
        fault = EngineFault(Boundary.ENGINE, Cause.LOST if passing else Cause.REFUSED, f"HTTP{status}", f"HTTP {status}: {text}")
        return _Again(fault) if passing else fault
