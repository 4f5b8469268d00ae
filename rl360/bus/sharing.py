"""Sharing work: a durable pull consumer with explicit acknowledgement, read by any number of workers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg

from rl360.bus.codec import EventError, Recorded, record
from rl360.bus.connection import api
from rl360.bus.pull import ConsumerGone, Pull
from rl360.bus.reading import message, position

log = logging.getLogger(__name__)

_CREATE_DEADLINE: Final = 30.0


class Delivery:
    """One piece of work. Exactly one of `ack`, `nak` and `term` ends it; `beat` keeps it from being given to another."""

    def __init__(self, client: Client, msg: Msg, record: Recorded) -> None:
        self._client, self._reply = client, msg.reply
        self.recorded = record

    async def ack(self) -> None:
        await self._client.publish(self._reply, b"+ACK")

    async def nak(self, delay: float) -> None:
        """Give it back; it is delivered again after `delay` seconds."""
        await self._client.publish(self._reply, b"-NAK " + json.dumps({"delay": int(delay * 1e9)}).encode())

    async def term(self, reason: str) -> None:
        """Never deliver it again; it goes to the dead letters with `reason`."""
        await self._client.publish(self._reply, b"+TERM " + reason.replace("\n", " ").encode()[:200])

    async def beat(self) -> None:
        """Still working: start the acknowledgement's clock anew."""
        await self._client.publish(self._reply, b"+WPI")


class Share:
    """A worker's end of a durable consumer. Use as an async context manager; `next` gives one delivery."""

    def __init__(
        self,
        client: Client,
        stream: str,
        durable: str,
        subjects: Sequence[str],
        *,
        ack_wait: float,
        max_deliver: int,
        max_in_flight: int,
        batch: int,
    ) -> None:
        self._client, self._stream, self._durable, self._batch = client, stream, durable, batch
        self._config = {
            "durable_name": durable,
            "ack_policy": "explicit",
            "ack_wait": int(ack_wait * 1e9),
            "max_deliver": max_deliver,
            "max_ack_pending": max_in_flight,
            "deliver_policy": "all",
            "replay_policy": "instant",
            "filter_subjects": list(subjects),
        }

    async def __aenter__(self) -> Share:
        await self._open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pull.__aexit__()

    async def next(self, timeout: float) -> Delivery | None:
        """The next piece of work, or None when none came within `timeout` seconds.

        A message that is no event is ended (`term`) and so lands in the dead letters.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            try:
                msg = await self._pull.next(max(0.0, end - loop.time()))
            except ConsumerGone:
                await self._pull.__aexit__()
                await self._open()
                continue
            if msg is None:
                return None
            at = position(msg.reply)
            try:
                return Delivery(self._client, msg, record(message(msg, at), at.deliveries))
            except EventError as e:
                log.error("not an event, moved to the dead letters: %s", e)
                await self._client.publish(msg.reply, b"+TERM " + str(e).encode()[:200])

    async def _open(self) -> None:
        await api(
            self._client,
            f"CONSUMER.CREATE.{self._stream}.{self._durable}",
            {"stream_name": self._stream, "config": self._config, "action": ""},
            deadline=_CREATE_DEADLINE,
        )
        self._pull = Pull(self._client, self._stream, self._durable, batch=self._batch)
        await self._pull.__aenter__()
