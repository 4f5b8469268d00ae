"""One pull consumer, read for as long as asked, across server restarts.

One pull request is open at a time. It ends when its batch is delivered or the server says so; when the server says
nothing (two heartbeats missed, or the connection was made anew) it is asked again. Nothing waits without a deadline.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from rl360.bus.connection import BusError, reconnects

BATCH: Final = 256
MAX_BYTES: Final = 16 << 20  # of one pull: below the server's max_pending, above the largest message
EXPIRES: Final = 30.0
HEARTBEAT: Final = 2.0
GONE_AFTER: Final = 1.5  # seconds of "no responders" after which the consumer is taken to be gone


class ConsumerGone(BusError):
    """The consumer was deleted, or did not survive a restart of the server."""


class Pull:
    """Messages of one consumer, in order of delivery. Use as an async context manager."""

    def __init__(self, client: Client, stream: str, consumer: str, *, batch: int = BATCH) -> None:
        self._client, self._batch = client, batch
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._buffer: deque[Msg] = deque()
        self._arrived = asyncio.Event()
        self._request = 0
        self._open = False
        self._left = 0
        self._refused_since = 0.0
        self._error: BusError | None = None

    async def __aenter__(self) -> Pull:
        self._loop = asyncio.get_running_loop()
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe(  # pyright: ignore[reportUnknownMemberType]
            f"{self._inbox}.*", cb=self._on, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self._heard = self._loop.time()
        self._reconnects: int = reconnects(self._client)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._client.is_closed:
            await self._subscription.unsubscribe()

    async def next(self, timeout: float) -> Msg | None:
        """The next message, or None when there is none within `timeout` seconds. Raises ConsumerGone."""
        end = self._loop.time() + timeout
        while not self._buffer:
            if self._error:
                raise self._error
            self._check_silence()
            if not self._open:
                await self._ask()
            left = end - self._loop.time()
            if left <= 0:
                return None
            self._arrived.clear()
            try:
                async with asyncio.timeout(min(left, 0.5)):
                    await self._arrived.wait()
            except TimeoutError:
                continue
        return self._buffer.popleft()

    def _check_silence(self) -> None:
        made = reconnects(self._client)
        if made != self._reconnects or self._loop.time() - self._heard > 2 * HEARTBEAT + 0.5:
            self._reconnects, self._open, self._heard = made, False, self._loop.time()

    async def _ask(self) -> None:
        self._request += 1
        self._open, self._left, self._heard = True, self._batch, self._loop.time()
        body = {
            "batch": self._batch,
            "max_bytes": MAX_BYTES,
            "expires": int(EXPIRES * 1e9),
            "idle_heartbeat": int(HEARTBEAT * 1e9),
        }
        try:
            await self._client.publish(self._next_subject, json.dumps(body).encode(), reply=f"{self._inbox}.{self._request}")
        except nats.errors.OutboundBufferLimitError:
            self._open = False

    async def _on(self, msg: Msg) -> None:
        headers = msg.headers
        status = headers.get("Status") if headers else None
        current = msg.subject.endswith(f".{self._request}")
        if current:
            self._heard = self._loop.time()
        if status is None:
            self._buffer.append(msg)
            self._refused_since = 0.0
            if current:
                self._left -= 1
                if self._left == 0:
                    self._open = False
        elif current and status != "100":
            self._open = False
            self._on_status(status, headers.get("Description", "") if headers else "")
        self._arrived.set()

    def _on_status(self, status: str, description: str) -> None:
        if status == "409" and ("Deleted" in description or "push based" in description):
            self._error = ConsumerGone(f"{self._next_subject}: {description}")
        elif status == "400":
            self._error = BusError(f"{self._next_subject}: {status} {description}")
        elif status == "503":  # no responders: JetStream is still recovering, or the consumer is gone
            now = self._loop.time()
            self._refused_since = self._refused_since or now
            if now - self._refused_since > GONE_AFTER:
                self._error = ConsumerGone(f"{self._next_subject}: nobody answers")
            else:
                self._open = True  # ask again after the next wait, not in a tight loop
                self._loop.call_later(0.1, self._reopen, self._request)

    def _reopen(self, request: int) -> None:
        if request == self._request:
            self._open = False
            self._arrived.set()
