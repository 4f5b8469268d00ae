"""Reading a journal in order: replay up to a point, or follow it live. Every gap is noticed.

A consumer numbers what it delivers; when a number is missing, or the consumer was lost with its server, a new consumer
continues from the last event that was handed out: it must find that event as it was, or the journal was rewound. So a
reader sees each matching event once, in order, or fails.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from rl360.bus.codec import EventError, Message, Recorded, record
from rl360.bus.connection import BusError, JournalRewound, api
from rl360.bus.pull import ConsumerGone, Pull

log = logging.getLogger(__name__)

_INACTIVE: Final = 60.0  # the server removes a reader's consumer when nobody asked it for this long


class Position(msgspec.Struct, frozen=True):
    """What the acknowledgement subject of a delivery says."""

    deliveries: int
    stream_seq: int
    consumer_seq: int
    nanos: int
    pending: int


def position(reply: str) -> Position:
    """Parse `$JS.ACK.…` of a delivered message (with and without the domain tokens)."""
    tokens = reply.split(".")
    n, seq, cseq, nanos, pending = tokens[4:9] if len(tokens) < 11 else tokens[6:11]
    return Position(int(n), int(seq), int(cseq), int(nanos), int(pending))


def message(msg: Msg, at: Position) -> Message:
    """A delivered message as the journal holds it."""
    headers = msg.headers or {}
    return Message(
        at.stream_seq,
        at.nanos,
        msg.subject,
        headers.get("Nats-Msg-Id", ""),
        headers.get("RL360-Schema", ""),
        headers.get("traceparent", ""),
        msg.data,
    )


class Reader:
    """Ordered reading of a stream. Use as an async context manager; `next` gives one event."""

    def __init__(
        self,
        client: Client,
        stream: str,
        subjects: Sequence[str],
        *,
        start: int = 1,
        start_time: float | None = None,
    ) -> None:
        self._client, self._stream, self._subjects = client, stream, list(subjects)
        self._after = start - 1  # everything up to here was handed out
        self._start_time = start_time
        self._last: Position | None = None  # of what was handed out last
        self._returning = False  # the consumer is new and starts with that message
        self._pull: Pull | None = None
        self._consumer = ""
        self._cseq = 0
        self.caught_up = False  # everything that was in the stream when last looked at has been handed out
        self.unknown = 0  # events of newer versions, skipped
        self.malformed = 0
        self.recreated = 0

    async def __aenter__(self) -> Reader:
        await self._create()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._drop()

    async def next(self, timeout: float) -> Recorded | None:
        """The next event, or None when none came within `timeout` seconds. What is no event of this version is counted and skipped."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            found = await self.next_message(max(0.0, end - loop.time()))
            if found is None:
                return None
            try:
                return record(found)
            except EventError as e:
                self._skip(e)

    async def next_message(self, timeout: float) -> Message | None:
        """The next message, whatever its body is, or None when none came within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            msg = await self._message(max(0.0, end - loop.time()))
            if msg is None:
                return None
            at = position(msg.reply)
            if self._returning:
                self._return_to(at)
                continue
            if at.stream_seq <= self._after:
                continue  # delivered again
            if at.consumer_seq != self._cseq + 1:
                log.warning("gap in %s before message %d: reading again from %d", self._stream, at.stream_seq, self._after + 1)
                await self._recreate()
                continue
            self._cseq, self._after, self._last = at.consumer_seq, at.stream_seq, at
            self.caught_up = at.pending == 0
            return message(msg, at)

    def _return_to(self, at: Position) -> None:
        """The first message of a new consumer must be the last one that was handed out. Raises JournalRewound."""
        last = self._last
        assert last is not None
        if (at.stream_seq, at.nanos) != (last.stream_seq, last.nanos):
            raise self._rewound(last)
        self._returning, self._cseq, self.caught_up = False, at.consumer_seq, at.pending == 0

    def _rewound(self, last: Position) -> JournalRewound:
        return JournalRewound(f"{self._stream} does not hold event {last.stream_seq} any more: its server lost the end of the journal")

    def _skip(self, e: EventError) -> None:
        if e.unknown_type:
            self.unknown += 1
        else:
            self.malformed += 1
        log.error("skipped: %s", e)

    async def _message(self, timeout: float) -> Msg | None:
        if self._pull is None:
            await self._create()
        assert self._pull is not None
        try:
            return await self._pull.next(timeout)
        except ConsumerGone:
            await self._recreate()
            return await self._pull.next(timeout)

    async def _recreate(self) -> None:
        self.recreated += 1
        await self._drop()
        await self._create()

    async def _create(self) -> None:
        self._consumer = f"reader-{secrets.token_hex(6)}"
        self._cseq = 0
        config: dict[str, Any] = {
            "name": self._consumer,
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE * 1e9),
            "replay_policy": "instant",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last.stream_seq if self._last else self._after + 1,
        }
        if self._start_time is not None and self._after <= 0:
            del config["opt_start_seq"]
            config["deliver_policy"] = "by_start_time"
            config["opt_start_time"] = datetime.fromtimestamp(self._start_time, UTC).isoformat()
        if self._subjects:
            config["filter_subjects"] = self._subjects
        info = await api(
            self._client,
            f"CONSUMER.CREATE.{self._stream}.{self._consumer}",
            {"stream_name": self._stream, "config": config, "action": "create"},
        )
        self._returning = self._last is not None
        if self._last is not None and info["num_pending"] == 0:
            raise self._rewound(self._last)
        self.caught_up = info["num_pending"] == 0
        self._pull = Pull(self._client, self._stream, self._consumer)
        await self._pull.__aenter__()

    async def _drop(self) -> None:
        if self._pull is None:
            return
        pull, self._pull = self._pull, None
        await pull.__aexit__()
        if self._client.is_connected:
            try:
                await api(self._client, f"CONSUMER.DELETE.{self._stream}.{self._consumer}", deadline=2.0)
            except BusError as e:  # the server removes an idle consumer by itself, and loses it when it is killed
                log.info("reader %s is left to the server: %s", self._consumer, e)
