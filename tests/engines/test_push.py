"""Weight push over a real gloo group to engines in processes of their own, which die, hang and lie."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from rl360.bus import events as ev
from rl360.engines.checksum import checksum_of, combined
from rl360.engines.contract import TORN
from rl360.engines.push import Pusher
from rl360.engines.push_outcome import PushOutcome

UPDATE = "/update_weights_from_distributed"
WEIGHTS = {
    "embed": torch.arange(64, dtype=torch.float32).reshape(8, 8),
    "norm": torch.full((3,), 0.5, dtype=torch.bfloat16),
    "head": torch.arange(128, dtype=torch.float32),
}
BUCKET = 256  # bytes: three buckets


class Engine:
    def __init__(self, pid: int, port: int, http: aiohttp.ClientSession) -> None:
        self.pid, self.url, self._http = pid, f"http://127.0.0.1:{port}", http

    async def fault(self, how: str, at: str = "", call: int = 1) -> None:
        (await self._http.post(self.url + "/_fault", json={"how": how, "at": at, "call": call})).close()

    async def state(self) -> dict[str, Any]:
        async with self._http.get(self.url + "/_state") as reply:
            return await reply.json()

    async def updates(self) -> int:
        return (await self.state())["calls"].count(UPDATE)

    async def checksums(self) -> dict[str, str]:
        async with self._http.post(self.url + "/weights_checker", json={"action": "checksum"}) as reply:
            return (await reply.json())["ranks"][0]["checksums"]


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("fake_engine.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(10)


@pytest.fixture
async def start(nursery: subprocess.Popen[str]) -> AsyncIterator[Callable[[], Any]]:
    started: list[Engine] = []
    async with aiohttp.ClientSession() as http:

        async def one(version: str = "") -> Engine:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            assert nursery.stdin is not None and nursery.stdout is not None
            nursery.stdin.write(f"{port} {version}\n")
            nursery.stdin.flush()
            engine = Engine(int(await asyncio.to_thread(nursery.stdout.readline)), port, http)
            started.append(engine)
            async with asyncio.timeout(20):
                while True:
                    try:
                        await engine.state()
                        return engine
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.02)

        yield one
        for engine in started:
            try:
                os.kill(engine.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
async def pusher() -> AsyncIterator[Pusher]:
    async with Pusher(bucket_bytes=BUCKET, timeout=20, call_timeout=2) as pusher:
        yield pusher


PATIENCE = 60.0


@pytest.fixture
async def patient() -> AsyncIterator[Pusher]:
    """What it ends sooner was not ended by a clock."""
    async with Pusher(bucket_bytes=BUCKET, timeout=2 * PATIENCE, call_timeout=PATIENCE) as pusher:
        yield pusher


def results(outcome: PushOutcome) -> dict[str, ev.PushResult]:
    return {r.generation: r for r in outcome.results}


async def test_weights_arrive_bit_equal_and_the_group_is_kept_while_the_plan_is_the_same(start: Any, pusher: Pusher) -> None:
    a, b = await start(), await start()
    engines = {"a": a.url, "b": b.url}
    first = await pusher.push(1, WEIGHTS, engines)
    assert [(r.ok, r.calls, r.bytes) for r in first.results] == [(True, 3, 774)] * 2
    assert [len(first.built), first.plan.path, 0 < first.pause_seconds < first.seconds] == [1, "broadcast", True]
    expected = checksum_of(WEIGHTS.items())
    assert await a.checksums() == await b.checksums() == expected
    assert {r.checksum for r in first.results} == {first.checksum} == {combined(expected)}

    changed = {**WEIGHTS, "norm": torch.full((3,), 2.0, dtype=torch.bfloat16)}
    second = await pusher.push(2, changed, engines)
    assert second.built == () and second.plan.digest == first.plan.digest
    assert await b.checksums() == checksum_of(changed.items())
    state = await a.state()
    assert (state["version"], state["paused"]) == ("2", False)
    assert state["calls"].count("/init_weights_update_group") == 1
    once = ["/pause_generation", "/begin_weight_update", UPDATE, UPDATE, UPDATE, "/end_weight_update", "/weights_checker"]
    assert state["calls"][1:10] == [*once, "/update_weight_version", "/continue_generation"]


async def test_a_changed_set_gets_a_new_plan_and_the_old_group_is_given_up(start: Any, pusher: Pusher) -> None:
    a, b = await start(), await start()
    await pusher.push(1, WEIGHTS, {"a": a.url})
    outcome = await pusher.push(1, WEIGHTS, {"a": a.url, "b": b.url}, attempt=2)
    built, pushed = outcome.events("run", 3)
    assert isinstance(built, ev.PlanBuilt) and built.generations == ("a", "b") and built.plan == outcome.plan.digest
    assert isinstance(pushed, ev.WeightsPushed) and (pushed.version, pushed.attempt, pushed.plan) == (1, 2, built.plan)
    assert len((await a.state())["groups"]) == 1


async def test_no_engine_is_no_error(pusher: Pusher) -> None:
    outcome = await pusher.push(1, WEIGHTS, {})
    assert (outcome.results, outcome.pause_seconds) == ((), 0.0)


@pytest.mark.parametrize("call", [1, 2])
async def test_case33_an_engine_that_dies_in_a_push_is_left_out_and_the_rest_get_it(start: Any, patient: Pusher, call: int) -> None:
    a, b = await start(), await start()
    await b.fault("die", UPDATE, call)
    outcome = await patient.push(1, WEIGHTS, {"a": a.url, "b": b.url})
    found = results(outcome)
    assert found["a"].ok and not found["b"].ok and "lost" in found["b"].error
    assert [p.generations for p in outcome.built] == [("a", "b"), ("a",)]
    assert await a.checksums() == checksum_of(WEIGHTS.items())
    assert (await a.state())["version"] == "1" and not (await a.state())["paused"]
    assert outcome.seconds < PATIENCE, "a dead engine is noticed by its connection, not by a timeout"


async def test_an_engine_that_is_down_before_the_push_costs_no_timeout(start: Any, patient: Pusher) -> None:
    a, b = await start(), await start()
    os.kill(b.pid, signal.SIGKILL)
    outcome = await patient.push(1, WEIGHTS, {"a": a.url, "b": b.url})
    assert [r.ok for r in outcome.results] == [True, False]
    assert outcome.seconds < PATIENCE, "a dead engine is noticed by its connection, not by a timeout"


async def test_case35_a_hung_engine_holds_nobody_beyond_the_deadline(start: Any, pusher: Pusher) -> None:
    a, b = await start(), await start()
    await b.fault("hang", UPDATE, 2)
    outcome = await pusher.push(1, WEIGHTS, {"a": a.url, "b": b.url})
    assert [r.ok for r in outcome.results] == [True, False]
    assert not (await a.state())["paused"]
    assert outcome.seconds < 10


async def test_case31_wrong_weights_are_found_by_checksum(start: Any, pusher: Pusher) -> None:
    a, b = await start(), await start()
    await b.fault("corrupt")
    outcome = await pusher.push(1, WEIGHTS, {"a": a.url, "b": b.url})
    found = results(outcome)
    assert found["a"].ok and not found["b"].ok and "embed" in found["b"].error
    assert (await b.state())["version"] == "0", "garbage must not carry the version's label"


async def test_a_lost_call_is_tried_once_more_on_the_same_set(start: Any, pusher: Pusher) -> None:
    a, b = await start(), await start()
    await b.fault("flaky", UPDATE, 2)
    outcome = await pusher.push(1, WEIGHTS, {"a": a.url, "b": b.url})
    assert all(r.ok for r in outcome.results) and len(outcome.built) == 1
    assert await a.updates() == 5  # two of the first round, then all three


@pytest.mark.parametrize("at", ["/init_weights_update_group", "/pause_generation", "/begin_weight_update", UPDATE, "/end_weight_update"])
async def test_case34_engines_never_stay_paused(start: Any, pusher: Pusher, at: str) -> None:
    a, b = await start(), await start()
    await b.fault("refuse", at)
    outcome = await pusher.push(1, WEIGHTS, {"a": a.url, "b": b.url})
    assert [r.ok for r in outcome.results] == [True, False]
    assert not (await a.state())["paused"] and not (await b.state())["paused"]


async def test_case34_an_engine_that_does_not_continue_is_not_ok(start: Any, pusher: Pusher) -> None:
    a = await start()
    await a.fault("refuse", "/continue_generation")
    outcome = await pusher.push(1, WEIGHTS, {"a": a.url})
    assert [r.ok for r in outcome.results] == [False] and "/continue_generation" in outcome.results[0].error


async def test_a_cancelled_push_leaves_no_engine_paused(start: Any, pusher: Pusher) -> None:
    a, b = await start(), await start()
    await b.fault("hang", UPDATE, 2)
    task = asyncio.create_task(pusher.push(1, WEIGHTS, {"a": a.url, "b": b.url}))
    async with asyncio.timeout(15):
        while await a.updates() < 2:
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled() and not (await a.state())["paused"]


async def test_the_whole_push_has_a_deadline(start: Any) -> None:
    a, b = await start(), await start()
    await b.fault("hang", UPDATE, 2)
    async with Pusher(bucket_bytes=BUCKET, timeout=2, call_timeout=2) as pusher:
        outcome = await pusher.push(1, WEIGHTS, {"a": a.url, "b": b.url})
    assert [r.ok for r in outcome.results] == [False, False] and "longer than 2 s" in outcome.results[0].error
    assert not (await a.state())["paused"]
    assert outcome.seconds < 8


@pytest.mark.parametrize(("version", "mode", "sessions"), [("0.5.17", "abort", False), ("0.5.23", "retract", True)])
async def test_an_engine_that_writes_live_weights_is_torn_until_its_checksums_agree(
    start: Any, pusher: Pusher, version: str, mode: str, sessions: bool
) -> None:
    a = await start(version)
    outcome = await pusher.push(7, WEIGHTS, {"a": a.url})
    assert [(r.ok, r.error, r.checksum) for r in outcome.results] == [(True, "", outcome.checksum)]
    state = await a.state()
    assert (state["mode"], state["labels"], state["paused"]) == (mode, [TORN, "7"], False)
    assert [(path in state["calls"]) for path in ("/begin_weight_update", "/end_weight_update")] == [sessions] * 2
    assert state["calls"].index("/pause_generation") < state["calls"].index("/update_weight_version") < state["calls"].index(UPDATE)


async def test_case31_garbage_stays_torn(start: Any, pusher: Pusher) -> None:
    a = await start("0.5.17")
    await a.fault("corrupt")
    outcome = await pusher.push(1, WEIGHTS, {"a": a.url})
    assert not outcome.results[0].ok and "embed" in outcome.results[0].error
    assert (await a.state())["version"] == TORN and not (await a.state())["paused"]


async def test_an_engine_that_cannot_be_driven_is_left_out(start: Any, pusher: Pusher) -> None:
    a, old, other = await start(), await start("0.4.6"), await start("vllm")
    outcome = await pusher.push(1, WEIGHTS, {"a": a.url, "old": old.url, "other": other.url})
    found = results(outcome)
    assert found["a"].ok and "older than 0.5.17" in found["old"].error and "no version of SGLang" in found["other"].error
    assert not (await old.state())["calls"]


async def test_memory_is_shared_with_engines_on_a_gpu_alone(start: Any) -> None:
    a = await start("0.5.23")
    async with Pusher(bucket_bytes=BUCKET, timeout=20, call_timeout=2, shared_memory=True) as pusher:
        outcome = await pusher.push(1, WEIGHTS, {"a": a.url})
    assert not outcome.results[0].ok and 'push.path = "broadcast"' in outcome.results[0].error
    assert not (await a.state())["calls"]
