"""The real SMG in front of engines that echo: what passes, where it goes, and what happens when an engine is gone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from rl360.bus.events import Boundary, Cause
from rl360.engines import gateway
from rl360.engines.client import EngineError
from rl360.engines.gateway import GatewayClient, Worker, corrections


async def add(front: Any, *engines: Any) -> None:
    for engine in engines:
        await front.api.add(engine.url)
    await front.until(*(e.url for e in engines))


async def test_s1_body_and_reply_pass_byte_for_byte(front: Any, echo: Any) -> None:
    a = await echo("a")
    await add(front, a)
    odd = b'{ "input_ids" : [1,2,3],"x":1.50,  "nested":{"u":"\\u00e9","k":null} , "input_ids2":[]}'
    assert await front.generate("s", odd) == (200, a.reply)
    assert a.requests[-1][0] == odd


async def test_a_conversation_of_58k_tokens_passes(front: Any, echo: Any) -> None:
    a = await echo("a")
    await add(front, a)
    body = json.dumps({"input_ids": list(range(100_000, 158_000)), "sampling_params": {}}).encode()
    a.reply = json.dumps({"output_ids": [7] * 500_000}).encode()
    assert await front.generate("s", body) == (200, a.reply)
    assert a.requests[-1][0] == body


async def test_trace_and_request_id_reach_the_engine(front: Any, echo: Any) -> None:
    a = await echo("a")
    await add(front, a)
    sent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x-request-id": "t0-g000-a1.1:3"}
    await front.generate("t0-g000-a1.1", **sent)
    got = {k.lower(): v for k, v in a.requests[-1][1].items()}
    assert {k: got[k] for k in sent} == sent and got["x-smg-routing-key"] == "t0-g000-a1.1"


async def test_a_session_sticks_to_its_engine_and_a_new_engine_moves_none(front: Any, echo: Any) -> None:
    a, b, c = await echo("a"), await echo("b"), await echo("c")
    await add(front, a, b)
    keys = [f"s{i}" for i in range(20)]
    first = {k: await front.engine_of(k) for k in keys}
    assert set(first.values()) == {"a", "b"}
    await add(front, a, b, c)
    assert {k: await front.engine_of(k) for k in keys} == first
    assert "c" in {await front.engine_of(f"new{i}") for i in range(20)}


async def test_new_sessions_go_where_the_load_is_least(front: Any, echo: Any) -> None:
    a, b = await echo("a"), await echo("b")
    a.going.clear()
    await add(front, a, b)
    arrived = asyncio.create_task(a.arrived.wait())
    tries = 0
    while not arrived.done():  # one session after the other, until "a" holds one: then "b" has no load
        held, tries = asyncio.create_task(front.generate(f"s{tries}")), tries + 1
        await asyncio.wait({held, arrived}, return_when=asyncio.FIRST_COMPLETED)
    assert {await front.engine_of(f"more{i}") for i in range(6)} == {"b"}
    a.going.set()
    await held


async def test_a_paused_engine_is_not_evicted(front: Any, echo: Any) -> None:
    """SGLang's /health answers 503 while paused, and nothing comes out of it: its sessions wait, they don't move."""
    a, b = await echo("a"), await echo("b")
    await add(front, a, b)
    key = await front.key_on("a")
    a.healthy = False
    a.going.clear()
    a.arrived.clear()
    waiting = [asyncio.create_task(front.generate(key)) for _ in range(8)]
    await asyncio.wait_for(a.arrived.wait(), 5)
    await asyncio.wait(waiting, timeout=3.5)  # longer than SMG's default patience with a stalled engine (3 s)
    waiting.append(asyncio.create_task(front.generate(key)))
    a.going.set()
    assert [r for r in await asyncio.gather(*waiting) if r != (200, a.reply)] == []


async def test_case33_an_engine_that_dies_gives_an_error_at_once_and_the_request_is_not_sent_again(front: Any, echo: Any) -> None:
    a, b = await echo("a"), await echo("b")
    await add(front, a, b)
    key = await front.key_on("a")
    seen, a.die = len(a.requests), True
    status, content = await front.generate(key)
    assert (status, len(a.requests) - seen) == (500, 1), content
    await a.runner.cleanup()
    async with asyncio.timeout(3):
        assert (await front.generate(key))[0] == 500, "sessions of a dead engine fail until membership takes it out"


async def test_a_removed_engine_gets_nothing_new_and_what_is_in_flight_ends(front: Any, echo: Any) -> None:
    a, b = await echo("a"), await echo("b")
    await add(front, a, b)
    key = await front.key_on("a")
    a.going.clear()
    a.arrived.clear()
    in_flight = asyncio.create_task(front.generate(key))
    await asyncio.wait_for(a.arrived.wait(), 5)
    worker = next(w for w in await front.api.workers() if w.url == a.url)
    await front.api.remove(worker.id)
    await front.until(b.url)
    assert await front.engine_of(key) == "b"
    await front.api.add(a.url)  # refused while it drains: harmless
    await front.api.remove(worker.id)
    a.going.set()
    assert await in_flight == (200, a.reply)


async def test_asking_again_is_harmless(front: Any, echo: Any) -> None:
    a = await echo("a")
    await add(front, a)
    await front.api.add(a.url)
    assert [w.url for w in await front.api.workers() if w.status == "ready"] == [a.url]
    await front.api.remove("01a232d1-4705-7209-ae0a-96c58480f7f1")


async def test_without_engines_the_gateway_says_so(front: Any) -> None:
    await front.until()
    status, content = await front.generate("s")
    assert status in (404, 503) and b"vailable" in content


async def test_case35_every_call_has_a_deadline_and_a_typed_error(echo: Any) -> None:
    a = await echo("a")
    a.going.clear()
    async with aiohttp.ClientSession() as http:
        slow = GatewayClient(http, a.url, timeout=0.2)
        with pytest.raises(EngineError) as timed_out:
            await slow.call("POST", "/generate", bytes, {})
        a.going.set()
        with pytest.raises(EngineError) as nonsense:
            await slow.call("GET", "/v1/models", list[int])
        with pytest.raises(EngineError) as refused:
            await slow.workers()
        await a.runner.cleanup()
        with pytest.raises(EngineError) as gone:
            await slow.workers()
    causes = [e.value.cause for e in (timed_out, nonsense, refused, gone)]
    assert causes == [Cause.TIMEOUT, Cause.UNKNOWN, Cause.REFUSED, Cause.LOST]
    assert refused.value.status == 404 and gone.value.boundary is Boundary.GATEWAY


async def test_a_gateway_that_does_not_come_up_is_a_start_failure() -> None:
    with pytest.raises(EngineError, match=r"not up within 0\.1 s") as error:
        await gateway.wait_ready("http://127.0.0.1:9", 0.1)
    assert error.value.cause is Cause.START_FAILED


def test_corrections_leave_draining_engines_alone() -> None:
    listed = [Worker("1", "http://a", "ready"), Worker("2", "http://b", "draining"), Worker("3", "http://c", "ready")]
    assert corrections({"http://a", "http://d"}, listed) == (["http://d"], ["3"])
    assert corrections({"http://a", "http://c"}, listed) == ([], [])
    assert corrections((), []) == ([], [])
