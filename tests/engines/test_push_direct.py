"""Experts straight from the ranks that hold them to the GPUs that serve them: real gloo, real tiny engines of two ranks each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

import rl360.tiny
from rl360.engines.checksum import checksum_of, combined
from rl360.engines.expert_rank import ExpertRank, Order
from rl360.engines.plan import expert_of
from rl360.engines.push import Pusher
from rl360.engines.push_outcome import PushOutcome
from rl360.engines.together import detached
from rl360.engines.weights import HeldExpert, shard_spec
from rl360.tiny.upcycle import Recipe, upcycle
from tests.engines.tiny_models import Oracle
from tests.engines.tiny_server import Client, tiny_server

EXPERTS, EP, BUCKET = 8, 2, 200_000


class Ranks:
    """Trainer ranks in this process: rank r holds the experts that r serves among `count`."""

    def __init__(self, count: int) -> None:
        self.ranks = [ExpertRank() for _ in range(count)]
        self.lost: set[int] = set()

    async def do(self, orders: Mapping[int, Order]) -> None:
        if dead := self.lost & orders.keys():
            raise RuntimeError(f"rank {min(dead)}: is gone")
        await asyncio.gather(*(detached(lambda r=r, o=o: self.ranks[r].perform(o)) for r, o in orders.items()))

    def hold(self, version: int, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[HeldExpert]]:
        """Weights of no expert, and what the ranks hold now."""
        held: list[HeldExpert] = []
        for r, rank in enumerate(self.ranks):
            own = {n: t for n, t in weights.items() if (e := expert_of(n)) is not None and e * len(self.ranks) // EXPERTS == r}
            rank.hold(version, own)
            sums = checksum_of(own.items())
            held += [HeldExpert(shard=shard_spec(n, t, rank=r), checksum=sums[n]) for n, t in own.items()]
        return {n: t for n, t in weights.items() if expert_of(n) is None}, held


class Set:
    """Engines that come and go, and pushes to whatever there is."""

    def __init__(self, stack: AsyncExitStack, folder: Path, pusher: Pusher, ranks: Ranks, weights: dict[str, Tensor]) -> None:
        self.stack, self.folder, self.pusher, self.ranks, self.weights = stack, folder, pusher, ranks, weights
        self.live: dict[str, Client] = {}
        self._ends: dict[str, AsyncExitStack] = {}

    async def start(self, name: str) -> Client:
        end = self._ends[name] = await self.stack.enter_async_context(AsyncExitStack())
        self.live[name] = await end.enter_async_context(tiny_server(Oracle(None, self.folder), ep=EP))
        return self.live[name]

    async def end(self, name: str) -> None:
        del self.live[name]
        await self._ends.pop(name).aclose()

    async def push(self, version: int, *, apart: bool = True, gone: Mapping[str, str] = {}) -> PushOutcome:
        weights = {n: t + 0.001 * version for n, t in self.weights.items()}
        rest, held = self.ranks.hold(version, weights) if apart else (weights, [])
        engines = {g: c.url for g, c in self.live.items()} | dict(gone)
        unable = await self.pusher.unable(engines, EXPERTS) if apart else "the test says so"
        return await self.pusher.push(version, rest, engines, experts=held, unable=unable)

    def received(self) -> dict[str, int]:
        return {g: sum(c.engine.groups.received) for g, c in self.live.items()}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    upcycle(Path(rl360.tiny.__file__).with_name("policy"), folder, Recipe(experts=EXPERTS, topk=2), seed=0)
    return folder


@pytest.fixture
async def engines(moe: Path) -> AsyncIterator[Set]:
    ranks = Ranks(4)
    async with AsyncExitStack() as stack:
        pusher = await stack.enter_async_context(Pusher(bucket_bytes=BUCKET, timeout=40, call_timeout=8, holders=ranks))
        yield Set(stack, moe, pusher, ranks, load_file(moe / "model.safetensors"))


def share(outcome: PushOutcome) -> dict[str, tuple[int, int]]:
    """What the plan says that each engine takes."""
    return {s.generation: (s.calls, s.bytes) for s in outcome.plan.seats}


def counted(outcome: PushOutcome) -> dict[str, tuple[int, int]]:
    return {r.generation: (r.calls, r.bytes) for r in outcome.results}


async def test_both_paths_leave_the_same_weights_and_take_the_calls_and_bytes_of_their_plans(engines: Set) -> None:
    await engines.start("a")
    await engines.start("b")
    weights = {n: t + 0.001 for n, t in engines.weights.items()}
    experts = sum(t.nbytes for n, t in weights.items() if expert_of(n) is not None)
    rest = sum(t.nbytes for t in weights.values()) - experts

    direct = await engines.push(1)
    assert direct.plan.path == "direct" and [r.ok for r in direct.results] == [True, True], direct.results
    assert direct.plan.holders == (0, 1, 2, 3)
    assert counted(direct) == share(direct)
    taken = engines.received()
    assert taken == {g: size for g, (_, size) in share(direct).items()} == dict.fromkeys("ab", EP * rest + experts)

    broadcast = await engines.push(1, apart=False)
    assert broadcast.plan.path == "broadcast" and "the test says so" in broadcast.plan.why
    assert counted(broadcast) == share(broadcast)
    assert {g: n - taken[g] for g, n in engines.received().items()} == dict.fromkeys("ab", EP * (rest + experts))
    assert {r.checksum for o in (direct, broadcast) for r in o.results} == {combined(checksum_of(weights.items()))}


async def test_the_direct_path_outlives_every_change_of_the_set(engines: Set) -> None:
    """An engine dies and is replaced; a push while a second is down; its replacement joins; a dead engine that never answers."""
    for name in ("a", "b"):
        await engines.start(name)
    first = await engines.push(1)
    urls = {g: c.url for g, c in engines.live.items()}
    await engines.end("b")
    told = [first, await engines.push(2, gone={"b": urls["b"]})]
    await engines.start("c")
    told += [await engines.push(3), await engines.push(4)]
    await engines.end("a")
    told.append(await engines.push(5))
    await engines.start("d")
    told += [await engines.push(6), await engines.push(7, gone={"a": urls["a"]})]
    assert [o.plan.path for o in told] == ["direct"] * 7
    assert {r.calls for o in told for r in o.results if r.ok} == {len(first.plan.buckets) + 1}, "calls an engine stay at the direct count"
    assert [len(o.built) for o in told] == [1, 1, 1, 0, 1, 1, 2], (
        "one for each new set, none for the same; two where one was named that is gone"
    )
    assert [[r.generation for r in o.results if r.ok] for o in told] == [
        ["a", "b"],
        ["a"],
        ["a", "c"],
        ["a", "c"],
        ["c"],
        ["c", "d"],
        ["c", "d"],
    ]


async def test_a_rank_that_is_gone_ends_the_push_and_leaves_no_engine_paused(engines: Set) -> None:
    engine = await engines.start("a")
    assert (await engines.push(1)).results[0].ok
    engines.ranks.lost.add(2)
    failed = await engines.push(2)
    assert not failed.results[0].ok and "rank 2: is gone" in failed.results[0].error
    assert await engine.metric("weight_version") == 1 and await engine.metric("paused") == 0
    engines.ranks.lost.clear()
    assert (await engines.push(3)).results[0].ok and await engine.metric("weight_version") == 3


async def test_an_expert_sent_to_another_gpu_is_refused_and_nothing_is_written(engines: Set) -> None:
    engine = await engines.start("a")
    name = "model.layers.0.mlp.experts.7.up_proj.weight"
    part: dict[str, Any] = {"source": 0, "names": [name], "dtypes": ["float32"], "shapes": [list(engines.weights[name].shape)]}
    for gpu, more, why in (
        (0, {}, "gpu 1 serves it"),
        (2, {}, "this engine has 2"),
        (1, {"names": ["model.norm.weight"]}, "shape"),
        (1, {"dtypes": ["int7"]}, "int7"),
    ):
        await engine.post("/begin_weight_update")
        status, body = await engine.post("/update_experts_from_ranks", {"group_name": "none", "parts": [{**part, "gpu": gpu, **more}]})
        assert status == 400 and not body["success"], body
        assert why in body["message"] or "Group none not in" in body["message"]
        status, body = await engine.post("/end_weight_update")
        assert status == 400 and "thrown away" in body["message"]
