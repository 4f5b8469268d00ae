"""The trainer's own ranks send the experts they trained: two processes (dp 2, ep 2) to two tiny engines of two ranks each, over gloo."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import rl360.tiny
from rl360.config import parse
from rl360.engines.expert_rank import SendExperts
from rl360.engines.plan import expert_of
from rl360.engines.push import Pusher
from rl360.tiny.upcycle import Recipe, upcycle
from rl360.trainer import commands
from rl360.trainer.crew_thread import CrewThread
from tests.engines.tiny_models import Oracle
from tests.engines.tiny_server import tiny_server

EXPERTS, EP = 8, 2


@pytest.mark.timeout(120)
async def test_ranks_send_their_own_experts_and_both_paths_leave_the_same_weights(tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    upcycle(Path(rl360.tiny.__file__).with_name("policy"), folder, Recipe(experts=EXPERTS, topk=2), seed=0)
    trainer = {"dp": 2, "ep": EP, "routing_replay": True}
    config = parse({"policy": {"path": str(folder)}, "engine": {"routed_experts": True, "ep": EP}, "trainer": trainer})
    async with asyncio.timeout(100), AsyncExitStack() as stack:
        crew = await stack.enter_async_context(CrewThread(config, tmp_path / "run"))
        engines = {name: await stack.enter_async_context(tiny_server(Oracle(None, folder), ep=EP)) for name in "ab"}
        urls = {name: engine.url for name, engine in engines.items()}
        pusher = await stack.enter_async_context(Pusher(bucket_bytes=1 << 20, timeout=40, call_timeout=20, holders=crew.experts))
        await crew.do(commands.Restore())

        whole = await crew.do(commands.Export(0))
        broadcast = await pusher.push(0, whole.weights, urls)
        at_broadcast = {name: list(engine.engine.groups.received) for name, engine in engines.items()}
        apart = await crew.do(commands.Export(0, apart=True))
        direct = await pusher.push(0, apart.weights, urls, experts=apart.experts, unable=await pusher.unable(urls, EXPERTS))

        assert (broadcast.plan.path, direct.plan.path, direct.plan.holders) == ("broadcast", "direct", (0, 1))
        assert all(r.ok for o in (broadcast, direct) for r in o.results), (broadcast.results, direct.results)
        assert broadcast.checksum == direct.checksum and {r.checksum for r in (*broadcast.results, *direct.results)} == {direct.checksum}
        for outcome in (broadcast, direct):
            assert {r.generation: (r.calls, r.bytes) for r in outcome.results} == {
                s.generation: (s.calls, s.bytes) for s in outcome.plan.seats
            }
        assert not any(expert_of(name) is not None for name in apart.weights), "experts were never gathered on rank 0"

        served = sum(e.shard.bytes for e in apart.experts) // EP
        rest = sum(t.nbytes for t in apart.weights.values())
        for name, engine in engines.items():
            assert at_broadcast[name] == [rest + EP * served] * EP, "every expert comes to every GPU"
            here = [n - before for n, before in zip(engine.engine.groups.received, at_broadcast[name], strict=True)]
            assert here == [rest + served] * EP, "no byte of an expert that a GPU doesn't serve"

        assert pusher._group is not None and pusher._group._experts is not None
        stale = SendExperts(name=pusher._group._experts.name, version=7, to=((2, (apart.experts[-1].shard.name,)),), timeout=5)
        with pytest.raises(RuntimeError, match=r"rank 1: experts of version 7 are not held"):
            await crew.experts.do({1: stale})
