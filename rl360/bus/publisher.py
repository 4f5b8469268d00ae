"""Publish with a bounded window, a timeout a message and a retry under the same message id.

A server that is killed and started again loses no acknowledged message and stores none twice: the retry carries the
same `Nats-Msg-Id`, and the server drops the copy (within the stream's duplicate window).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from rl360.bus.connection import BusError, JetStreamError

ACK_TIMEOUT: Final = 2.0
_SOON: Final = 0.1  # seconds until a retry when the stream has no leader yet


class _ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct):
    """The server's receipt: journal sequence, and whether the message was there already."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _ApiError | None = None


_decoder = msgspec.json.Decoder(PubAck)


class _Slot:
    __slots__ = ("deadline", "future", "headers", "payload", "subject", "timer")

    def __init__(self, subject: str, payload: bytes, headers: dict[str, str], future: asyncio.Future[PubAck], deadline: float) -> None:
        self.subject, self.payload, self.headers = subject, payload, headers
        self.future, self.deadline = future, deadline
        self.timer: asyncio.TimerHandle | None = None


class Publisher:
    """Use as an async context manager; leaving it waits for what is in flight."""

    def __init__(
        self, client: Client, *, window: int = 1024, deadline: float = 60.0, on_full: Callable[[JetStreamError], None] | None = None
    ) -> None:
        """`on_full` is told when a stream takes no more: nothing that this publisher has to say can be recorded then."""
        self._client, self._deadline, self._on_full = client, deadline, on_full
        self._room = asyncio.Semaphore(window)
        self._slots: dict[str, _Slot] = {}
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.retries = 0
        self.duplicates = 0

    async def __aenter__(self) -> Publisher:
        self._loop = asyncio.get_running_loop()
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe(f"{self._inbox}.*", cb=self._on_reply)  # pyright: ignore[reportUnknownMemberType]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.flush()
        if not self._client.is_closed:
            await self._subscription.unsubscribe()

    async def submit(self, subject: str, payload: bytes, headers: dict[str, str]) -> asyncio.Future[PubAck]:
        """Send and return at once (waiting only while the window is full); the future ends with the receipt.

        It fails with JetStreamError when the server refuses and with BusError at the deadline. It never stays open.
        """
        await self._room.acquire()
        self._next += 1
        key = str(self._next)
        slot = _Slot(subject, payload, headers, self._loop.create_future(), self._loop.time() + self._deadline)
        self._slots[key] = slot
        await self._send(key, slot)
        return slot.future

    async def flush(self) -> None:
        """Wait until every message in flight has its receipt or its error."""
        while self._slots:
            await asyncio.wait([s.future for s in self._slots.values()])

    async def _send(self, key: str, slot: _Slot) -> None:
        slot.timer = self._loop.call_later(ACK_TIMEOUT, self._retry, key)
        try:
            await self._client.publish(slot.subject, slot.payload, reply=f"{self._inbox}.{key}", headers=slot.headers)
        except nats.errors.OutboundBufferLimitError:
            pass  # disconnected with a full buffer: the timer sends again
        except nats.errors.Error as e:
            self._finish(key, error=BusError(f"publishing to {slot.subject}: {e or type(e).__name__}"))

    def _retry(self, key: str) -> None:
        slot = self._slots.get(key)
        if slot is None:
            return
        if self._loop.time() >= slot.deadline:
            self._finish(key, error=BusError(f"no receipt for {slot.subject} within {self._deadline:g} s"))
            return
        self.retries += 1
        task = self._loop.create_task(self._send(key, slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_reply(self, msg: Msg) -> None:
        key = msg.subject.rsplit(".", 1)[1]
        slot = self._slots.get(key)
        if slot is None:
            return  # receipt of an earlier try
        ack = _decoder.decode(msg.data) if msg.data else PubAck(error=_ApiError(code=503, description="no responders"))
        if ack.error is None:
            self.duplicates += ack.duplicate
            self._finish(key, ack)
            return
        error = JetStreamError(ack.error.code, ack.error.err_code, ack.error.description)
        if error.transient:
            self._again_soon(key, slot)
            return
        if error.full and self._on_full is not None:
            self._on_full(error)
        self._finish(key, error=error)

    def _again_soon(self, key: str, slot: _Slot) -> None:
        if slot.timer:
            slot.timer.cancel()
        slot.timer = self._loop.call_later(_SOON, self._retry, key)

    def _finish(self, key: str, ack: PubAck | None = None, error: Exception | None = None) -> None:
        slot = self._slots.pop(key)
        if slot.timer:
            slot.timer.cancel()
        self._room.release()
        if slot.future.done():
            return  # its waiter was cancelled
        if error is not None:
            slot.future.set_exception(error)
        elif ack is not None:
            slot.future.set_result(ack)
