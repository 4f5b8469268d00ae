"""The whole way: trainer's tensors, gloo, two real tiny engines, the real SMG in front, and a kill -9 in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

import rl360.tiny
from rl360.engines.checksum import checksum_of, combined
from rl360.engines.push import Pusher

MODEL = Path(rl360.tiny.__file__).with_name("policy")
BUCKET = 100_000  # bytes: about ten buckets


@pytest.fixture
async def engines() -> AsyncIterator[dict[str, Any]]:
    """Two engines, each in a process of its own: name: (process, url)."""

    async def start() -> tuple[asyncio.subprocess.Process, str]:
        command = (sys.executable, "-m", "rl360.engines.tiny", "--model", str(MODEL), "--timeout", "20")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        return process, line.decode().split()[-1]

    started = dict(zip("ab", await asyncio.gather(start(), start()), strict=True))
    yield started
    for process, _ in started.values():
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


class Trap(dict[str, Tensor]):
    """Weights that do something, once, when one of them is read for sending."""

    def __init__(self, weights: dict[str, Tensor], name: str, act: Callable[[], None]) -> None:
        super().__init__(weights)
        self._name, self._act = name, act

    def __getitem__(self, name: str) -> Tensor:
        if name == self._name:
            self._name = ""
            self._act()
        return super().__getitem__(name)


def moved(weights: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    return {name: t + by for name, t in weights.items()}


async def version_of_sampling(front: Any, key: str) -> str:
    body = {"input_ids": [1, 5, 6, 7], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    status, content = await front.generate(key, json.dumps(body).encode())
    assert status == 200, content
    return json.loads(content)["meta_info"]["weight_version"]


async def test_weights_arrive_bit_equal_and_a_kill_in_mid_push_stops_nothing(engines: dict[str, Any], front: Any) -> None:
    weights = load_file(MODEL / "model.safetensors")
    (_, url_a), (b, url_b) = engines["a"], engines["b"]
    both = {"a": url_a, "b": url_b}
    async with Pusher(bucket_bytes=BUCKET, timeout=30, call_timeout=10) as pusher:
        first = await pusher.push(1, moved(weights, 0.001), both)
        assert [(r.ok, r.calls) for r in first.results] == [(True, len(first.plan.buckets))] * 2, first.results
        assert {r.checksum for r in first.results} == {combined(checksum_of(moved(weights, 0.001).items()))}
        assert 0 < first.pause_seconds <= first.seconds < 20
        for url in both.values():
            await front.api.add(url)
        await front.until(*both.values())
        assert {await version_of_sampling(front, f"s{i}") for i in range(6)} == {"1"}

        third = first.plan.buckets[2].shards[0].name
        trap = Trap(moved(weights, 0.002), third, lambda: os.killpg(b.pid, signal.SIGKILL))
        second = await pusher.push(2, trap, both)
        results = {r.generation: r for r in second.results}
        assert results["a"].ok and results["a"].checksum == second.checksum
        assert not results["b"].ok and "lost" in results["b"].error
        assert [p.generations for p in second.built] == [("a",)] and second.seconds < 10

        await front.api.remove(next(w.id for w in await front.api.workers() if w.url == url_b))
        await front.until(url_a)
        assert {await version_of_sampling(front, f"s{i}") for i in range(6)} == {"2"}
        third_push = await pusher.push(3, moved(weights, 0.003), {"a": url_a})
        assert [r.ok for r in third_push.results] == [True] and third_push.built == ()
        assert await version_of_sampling(front, "s0") == "3"
