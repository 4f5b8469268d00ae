"""The bus as a worker sees it: publish, replay, follow, share work, hold leases. One way to do each."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Final

from nats.aio.client import Client

from rl360.bus import events as ev
from rl360.bus import journal, selection, subjects, tracing
from rl360.bus.blobs import BlobStore
from rl360.bus.codec import Message, Recorded, encode
from rl360.bus.connection import BusAddress, BusError, JetStreamError, api, connect, is_missing, reconnects
from rl360.bus.leases import Leases
from rl360.bus.publisher import PubAck, Publisher
from rl360.bus.reading import Reader
from rl360.bus.sharing import Delivery, Share

__all__ = ["Bus", "BusAddress", "Delivery", "Reader", "Recorded", "Share"]

_POLL: Final = 0.5


class Bus:
    """A connection to the journal of one run. `async with Bus.connect(…) as bus`."""

    def __init__(self, address: BusAddress, run: str, blobs: BlobStore, name: str) -> None:
        self.run, self.blobs, self.name = subjects.check_run_name(run), blobs, name
        self._address = address
        self.on_full: Callable[[BusError], None] | None = None  # called when the journal takes no more; set it before entering
        self._stack = AsyncExitStack()

    @classmethod
    def connect(cls, address: BusAddress, run: str, blobs: BlobStore, *, name: str = "rl360") -> Bus:
        """A bus that connects when it is entered. Raises BusError when no server answers in 15 s."""
        return cls(address, run, blobs, name)

    async def __aenter__(self) -> Bus:
        self.client: Client = await connect(self._address, name=self.name)
        self._stack.push_async_callback(self._close)
        self.publisher = await self._stack.enter_async_context(Publisher(self.client, on_full=self.on_full))
        self.leases = Leases(self.client, self.publisher, self.run)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _close(self) -> None:
        with suppress(OSError):  # nats-py flushes what is pending, also into a connection that is gone
            await self.client.close()

    async def create_streams(self) -> None:
        """Create the run's streams where they are missing."""
        await journal.create_streams(self.client, self.run)

    # ------------------------------------------------------------------------------------------------ write

    async def submit(self, event: ev.Event) -> asyncio.Future[PubAck]:
        """Send an event without waiting for its receipt; the returned future ends with it. The trace context is its attempt's.

        Raises ValueError for an event of another run: a worker on a copied step must not touch the original.
        """
        if event.run != self.run:
            raise ValueError(f"{type(event).__name__} of run {event.run!r} can't be published to the journal of {self.run!r}")
        headers = {
            "Nats-Msg-Id": subjects.msg_id(event),
            "RL360-Schema": str(ev.SCHEMA_VERSION),
            "traceparent": tracing.traceparent_of(event),
        }
        return await self.publisher.submit(subjects.subject(event), encode(event), headers)

    async def publish(self, event: ev.Event) -> int:
        """Record an event; returns its sequence in the journal. Raises BusError when it could not be recorded."""
        return (await (await self.submit(event))).seq

    async def claim(self, event: ev.Event) -> bool:
        """Record an event whose id several may want to use; whether it is this one that the journal holds (S16)."""
        ack = await (await self.submit(event))
        if not ack.duplicate:
            return True
        held = [recorded.event async for recorded in self.replay(start=ack.seq, end=ack.seq)]
        return held == [event]  # sent twice by ourselves, around a restart of the server

    # ------------------------------------------------------------------------------------------------ read

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and made again."""
        return reconnects(self.client)

    def reader(
        self,
        *,
        types: Sequence[type[ev.Event]] = (),
        step: int | None = None,
        group: int | None = None,
        start: int = 1,
        start_time: float | None = None,
    ) -> Reader:
        """Ordered reading from `start` (a sequence) or `start_time` (unix seconds), filtered by the server."""
        return Reader(self.client, subjects.stream(self.run), self._filters(types, step, group), start=start, start_time=start_time)

    def _filters(self, types: Sequence[type[ev.Event]], step: int | None, group: int | None) -> list[str]:
        step_token = subjects.ANY if step is None else subjects.step_token(step)
        group_token = subjects.ANY if group is None else f"{group:03d}"
        names = [t.__name__ for t in types] or [subjects.ANY]
        return [subjects.pattern(self.run, step=step_token, type_=n, group=group_token) for n in names]

    async def replay(
        self,
        *,
        types: Sequence[type[ev.Event]] = (),
        step: int | None = None,
        group: int | None = None,
        start: int = 1,
        end: int | None = None,
        start_time: float | None = None,
    ) -> AsyncIterator[Recorded]:
        """Events up to sequence `end` (default: the newest now), in order, each once."""
        last = end if end is not None else await self.last_seq()
        async with self.reader(types=types, step=step, group=group, start=start, start_time=start_time) as reader:
            while not reader.caught_up:
                record = await reader.next(timeout=30.0)
                if record is None or record.seq > last:
                    return
                yield record

    async def messages(self, steps: Collection[int] | None = None) -> AsyncIterator[Message]:
        """Messages up to the newest now, unread and in order: all, or those that `steps` need (`selection`).

        Each part is asked for by itself: with one filter the server skips what lies between, with several it reads all of it.
        """
        last = await self.last_seq()
        if steps is None:
            async for message in self.matching((), end=last):
                yield message
            return
        filters = selection.filters(self.run, selection.parts(steps))
        parts = [[m async for m in self.matching([one], end=last)] for one in filters]
        for message in heapq.merge(*parts, key=lambda m: m.seq):
            yield message

    async def matching(self, patterns: Sequence[str], *, start: int = 1, end: int | None = None) -> AsyncIterator[Message]:
        """Messages from `start` to `end` (default: the newest now) whose subject matches one of `patterns` (none: all), in order."""
        last = await self.last_seq() if end is None else end
        async with Reader(self.client, subjects.stream(self.run), patterns, start=start) as reader:
            while not reader.caught_up:
                message = await reader.next_message(timeout=30.0)
                if message is None:
                    raise BusError(f"the journal of {self.run} went silent before its event {last}: is its server alive?")
                if message.seq > last:
                    return
                yield message

    async def follow(self, *, types: Sequence[type[ev.Event]] = (), start: int = 1, stop: asyncio.Event) -> AsyncIterator[Recorded]:
        """Replay from `start`, then go on live until `stop` is set."""
        async with self.reader(types=types, start=start) as reader:
            while not stop.is_set():
                record = await reader.next(timeout=_POLL)
                if record is not None:
                    yield record

    async def holds(self, seq: int, time: float) -> bool:
        """Whether the journal's event `seq` is the one that was recorded at `time` (unix seconds): not so after it was rewound."""
        if await self.last_seq() < seq:
            return False
        async with self.reader(start=seq) as reader:
            message = await reader.next_message(timeout=30.0)
        return message is not None and (message.seq, message.time) == (seq, time)

    async def forget_consumer(self, durable: str) -> None:
        """Remove a durable consumer; the next worker that shares it starts with the journal's first event."""
        try:
            await api(self.client, f"CONSUMER.DELETE.{subjects.stream(self.run)}.{durable}")
        except JetStreamError as e:
            if not is_missing(e):
                raise

    async def last_seq(self) -> int:
        """Sequence of the journal's newest event."""
        return await journal.last_seq(self.client, subjects.stream(self.run))

    # ------------------------------------------------------------------------------------------------ share

    def consume(
        self,
        durable: str,
        types: Sequence[type[ev.Event]],
        *,
        ack_wait: float,
        max_deliver: int,
        max_in_flight: int,
        batch: int = 1,
    ) -> Share:
        """Work shared under the name `durable`: each event goes to one worker, again when it isn't acknowledged in `ack_wait` s."""
        return Share(
            self.client,
            subjects.stream(self.run),
            durable,
            self._filters(types, None, None),
            ack_wait=ack_wait,
            max_deliver=max_deliver,
            max_in_flight=max_in_flight,
            batch=batch,
        )
