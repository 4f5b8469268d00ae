"""The bus on a real nats-server: what is published is read once, in order, whatever is killed."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, Reader
from rl360.bus.connection import BusError, JetStreamError, JournalRewound
from rl360.bus.journal import dead_letters


def closed(run: str, step: int, requested: int = 1) -> ev.StepClosed:
    return ev.StepClosed(run=run, step=step, requested=requested, valid=0, masked=0, infra=0, kept=0)


def joined(run: str, name: str) -> ev.EngineJoined:
    return ev.EngineJoined(run=run, generation=name, url="http://x")


@asynccontextmanager
async def own_bus(own_nats, tmp_path: Path, user: str = "admin", run: str = "test") -> AsyncIterator[Bus]:
    async with Bus.connect(own_nats.address(user), run, BlobStore(tmp_path / "blobs")) as bus:
        yield bus


async def _forever(reader: Reader) -> AsyncIterator[None]:
    """Read on, whatever comes."""
    while True:
        await reader.next(1)
    yield


async def test_same_event_published_twice_is_stored_once(bus: Bus) -> None:
    first = await bus.publish(closed(bus.run, 1))
    again = await bus.publish(closed(bus.run, 1))
    assert first == again
    assert bus.publisher.duplicates == 1
    assert [r.event.step async for r in bus.replay()] == [1]


async def test_replay_filters_by_step_type_and_sequence(bus: Bus) -> None:
    for step in range(4):
        await bus.publish(closed(bus.run, step))
        await bus.publish(joined(bus.run, f"e{step}"))
    assert [r.event.step async for r in bus.replay(types=[ev.StepClosed])] == [0, 1, 2, 3]
    assert [r.seq async for r in bus.replay(step=2)] == [5]
    assert [r.seq async for r in bus.replay(start=4, end=6)] == [4, 5, 6]
    assert [r.seq async for r in bus.replay(step=-1)] == [2, 4, 6, 8]
    times = [r.time async for r in bus.replay()]
    assert [r.seq async for r in bus.replay(start_time=times[5])] == [6, 7, 8]


async def test_replay_of_an_empty_journal_ends(bus: Bus) -> None:
    assert [r async for r in bus.replay()] == []


async def test_a_run_that_publishes_without_a_stream_gets_an_error(nats, tmp_path: Path) -> None:
    async with Bus.connect(nats.address(), f"n{secrets.token_hex(4)}", BlobStore(tmp_path)) as bus:
        bus.publisher._deadline = 0.5
        with pytest.raises(BusError, match="no receipt"):
            await bus.publish(closed(bus.run, 0))


async def test_unknown_and_malformed_events_are_counted_and_skipped(bus: Bus) -> None:
    await bus.publish(closed(bus.run, 0))
    raw = subjects.pattern(bus.run, step="1", type_="StepClosed", group="_")
    for body in (b"\x81\xa4type\xa8NewEvent", b"\xff\x00garbage"):
        await (await bus.publisher.submit(raw, body, {}))
    await bus.publish(closed(bus.run, 2))
    async with bus.reader() as reader:
        seen = [await reader.next(5), await reader.next(5)]
        assert [r.event.step for r in seen if r] == [0, 2]
        assert (reader.unknown, reader.malformed) == (1, 1)


async def test_killed_server_loses_and_repeats_nothing(own_nats, tmp_path: Path) -> None:
    async with own_bus(own_nats, tmp_path) as bus:
        await bus.create_streams()
        stop, seen = asyncio.Event(), list[int]()

        async def read() -> None:
            async for record in bus.follow(types=[ev.StepClosed], stop=stop):
                seen.append(record.event.step)
                if len(seen) == 600:
                    stop.set()

        reader = asyncio.create_task(read())
        for start in (0, 200, 400):
            receipts = [await bus.submit(closed(bus.run, i)) for i in range(start, start + 200)]
            await asyncio.gather(*receipts[:50])
            await asyncio.to_thread(own_nats.kill)
            await asyncio.to_thread(own_nats.start)
            await asyncio.gather(*receipts)
        await asyncio.wait_for(reader, 30)
        assert seen == list(range(600))


async def test_leaving_a_bus_whose_server_has_just_gone_is_no_error(own_nats, tmp_path: Path) -> None:
    async with own_bus(own_nats, tmp_path) as bus:
        await bus.create_streams()
        own_nats.kill()  # the event loop has not heard of it when the next is sent
        await bus.client.publish("anything", b"x" * 100_000)
        while not bus.client._transport._io_writer._protocol._connection_lost:  # type: ignore[union-attr]
            await asyncio.sleep(0)
        bus.client._pending.append(b"PING\r\n")
        bus.client._pending_data_size = 6


@pytest.mark.parametrize("more", [0, 40], ids=["and stays short", "and grows past what was read"])
async def test_a_reader_notices_that_the_journal_was_rewound(own_nats, tmp_path: Path, more: int) -> None:
    store, copy = tmp_path / "store", tmp_path / "older"
    async with own_bus(own_nats, tmp_path) as bus:
        await bus.create_streams()
        for step in range(10):
            await bus.publish(closed(bus.run, step))
        own_nats.kill()
        shutil.copytree(store, copy)
        await asyncio.to_thread(own_nats.start)
        async with bus.reader(types=[ev.StepClosed]) as reader:
            for step in range(10, 20):
                await bus.publish(closed(bus.run, step))
            read = [await reader.next(5) for _ in range(20)]
            last = read[-1]
            assert last and last.event.step == 19 and await bus.holds(last.seq, last.time)
            own_nats.kill()
            shutil.rmtree(store)
            shutil.copytree(copy, store)
            await asyncio.to_thread(own_nats.start)
            for step in range(30, 30 + more):
                await bus.publish(closed(bus.run, step))
            with pytest.raises(JournalRewound, match="does not hold event 20 any more"):
                await asyncio.wait_for(anext(_forever(reader)), 30)
        assert not await bus.holds(last.seq, last.time)
        assert read[5] and await bus.holds(read[5].seq, read[5].time)


async def test_a_consumer_that_was_forgotten_shares_out_everything_again(bus: Bus) -> None:
    await bus.forget_consumer("w")
    await bus.publish(closed(bus.run, 0))
    for _ in range(2):
        async with bus.consume("w", [ev.StepClosed], ack_wait=30.0, max_deliver=2, max_in_flight=8) as work:
            job = await work.next(5)
            assert job and job.recorded.deliveries == 1
            await job.ack()
            assert await work.next(0.3) is None
        await bus.forget_consumer("w")


async def test_shared_work_is_redelivered_and_dead_lettered(bus: Bus) -> None:
    await bus.publish(closed(bus.run, 0))
    await bus.publish(closed(bus.run, 1))
    async with bus.consume("w", [ev.StepClosed], ack_wait=1.0, max_deliver=2, max_in_flight=8) as work:
        first = await work.next(5)
        assert first and first.recorded.deliveries == 1
        await first.nak(0.01)
        second = await work.next(5)
        assert second
        await second.term("bad task")
        again = await work.next(5)
        assert again and again.recorded.deliveries == 2
        assert {first.recorded.seq, second.recorded.seq} == {1, 2}
        assert again.recorded.seq == first.recorded.seq
        await again.nak(0.01)
        assert await work.next(1.0) is None
    letters = await dead_letters(bus.client, bus.run)
    assert {(x.stream_seq, x.reason) for x in letters} == {(2, "bad task"), (1, "delivered too often")}


async def test_beat_keeps_work_from_others(bus: Bus) -> None:
    await bus.publish(closed(bus.run, 0))
    async with bus.consume("w", [ev.StepClosed], ack_wait=1.0, max_deliver=5, max_in_flight=8) as work:
        job = await work.next(5)
        assert job
        for _ in range(3):
            assert await work.next(0.6) is None
            await job.beat()
        await job.ack()
        assert await work.next(1.2) is None


async def test_work_survives_a_killed_server(own_nats, tmp_path: Path) -> None:
    async with own_bus(own_nats, tmp_path) as bus:
        await bus.create_streams()
        for i in range(5):
            await bus.publish(closed(bus.run, i))
        done: set[int] = set()
        async with bus.consume("w", [ev.StepClosed], ack_wait=2.0, max_deliver=9, max_in_flight=8) as work:
            job = await work.next(5)
            assert job
            await asyncio.to_thread(own_nats.kill)
            await asyncio.to_thread(own_nats.start)
            while len(done) < 5:
                job = await work.next(10)
                assert job
                done.add(job.recorded.event.step)
                await job.ack()
        assert done == set(range(5))


async def test_leases_expire_and_can_be_taken_once(bus: Bus) -> None:
    assert await bus.leases.acquire("engine.a", b"1", 30)
    assert not await bus.leases.acquire("engine.a", b"2", 30)
    await bus.leases.put("engine.b", b"x", 1)
    assert await bus.leases.keys() == {"engine.a", "engine.b"}
    assert await bus.leases.get("engine.a") == b"1"
    assert await bus.leases.get("engine.none") is None
    async with asyncio.timeout(10):
        while await bus.leases.keys() != {"engine.a"}:
            await asyncio.sleep(0.05)
    await bus.leases.delete("engine.a")
    assert await bus.leases.keys() == set()


async def test_a_worker_kind_publishes_its_own_events_only(own_nats, tmp_path: Path) -> None:
    async with own_bus(own_nats, tmp_path) as admin:
        await admin.create_streams()
    async with own_bus(own_nats, tmp_path, "runner") as runner:
        runner.publisher._deadline = 1.0
        failed = ev.InfraFailed(
            run="test",
            step=0,
            attempt="t0-g000-a0",
            group=0,
            session="t0-g000-a0.1",
            boundary=ev.Boundary.SANDBOX,
            cause=ev.Cause.LOST,
            exception="OSError",
        )
        assert await runner.publish(failed) == 1
        with pytest.raises(BusError):
            await runner.publish(closed("test", 0))
        assert [r.seq async for r in runner.replay()] == [1]


async def test_a_full_stream_is_told_from_a_large_message() -> None:
    assert JetStreamError(503, 10077, "maximum bytes exceeded").full
    assert not JetStreamError(400, 10077, "message size exceeds maximum allowed").full
