"""Hot weight updates over a real gloo group: atomic, refused before anything is written, and never in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from rl360.engines.checksum import checksum_of, dtype_name
from rl360.engines.collective import Collective
from rl360.engines.push import Pusher
from tests.engines.tiny_models import Oracle, dense, moe, prompt
from tests.engines.tiny_server import Client, generate_body, tiny_server

Named = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The same shape with other weights."""
    return dense(tmp_path_factory.mktemp("other"), seed=9)


class Sender:
    """The trainer's side: rank 0 of the groups it forms."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.groups: dict[str, Collective] = {}

    async def join(self, name: str = "push", *, timeout: float = 10.0) -> None:
        group = self.groups[name] = Collective("127.0.0.1", name, 2, backend="gloo", timeout=timeout)
        order = {"master_address": "127.0.0.1", "master_port": group.port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
        answer, _ = await asyncio.gather(
            self.client.post("/init_weights_update_group", {**order, "group_name": name}), asyncio.to_thread(group.connect)
        )
        assert answer[0] == 200, answer

    async def bucket(self, named: Named, *, group: str = "push", sent: Named | None = None, **change: Any) -> tuple[int, Any]:
        """Announce `named` and broadcast `sent` (the same, unless given)."""
        call = self.client.post("/update_weights_from_distributed", {**announcement(named, group), **change})
        answer, _ = await asyncio.gather(call, asyncio.to_thread(self.groups[group].broadcast, list((sent or named).values())))
        return answer

    async def push(self, named: Named, version: str, *, buckets: int = 3, **change: Any) -> tuple[int, Any]:
        """A whole model between begin and end; returns end's answer."""
        assert (await self.client.post("/begin_weight_update"))[0] == 200
        names = list(named)
        for i in range(buckets):
            part = {n: named[n] for n in names[i::buckets]}
            assert (await self.bucket(part, weight_version=version, **change))[0] == 200
        return await self.client.post("/end_weight_update")


def announcement(named: Named, group: str = "push") -> dict[str, Any]:
    return {
        "names": list(named),
        "dtypes": [dtype_name(t.dtype) for t in named.values()],
        "shapes": [list(t.shape) for t in named.values()],
        "group_name": group,
        "load_format": "flattened_bucket",
    }


@asynccontextmanager
async def pushing(oracle: Oracle, **options: Any) -> AsyncIterator[tuple[Client, Sender]]:
    async with tiny_server(oracle, **options) as client:
        sender = Sender(client)
        await sender.join()
        yield client, sender


async def held(client: Client) -> dict[str, str]:
    status, body = await client.post("/weights_checker", {"action": "checksum"})
    assert (status, body["success"], len(body["ranks"])) == (200, True, 1)
    return body["ranks"][0]["checksums"]


async def version(client: Client) -> str:
    return (await client.get("/model_info"))[1]["weight_version"]


async def test_a_push_is_live_at_the_end_and_its_checksum_agrees(oracle: Oracle, other: Oracle) -> None:
    async with pushing(oracle) as (client, sender):
        assert await held(client) == checksum_of(oracle.named().items())
        assert (await sender.push(other.named(), "3"))[0] == 200
        assert await held(client) == checksum_of(other.named().items())
        assert await version(client) == "3"
        body = await client.generate(prompt(10), 6)
        truth = other.logprobs(prompt(10), body["output_ids"])
        assert float((truth - torch.tensor([row[0] for row in body["meta_info"]["output_token_logprobs"]])).abs().max()) < 1e-5
        assert body["meta_info"]["weight_versions"] == [{"version": "3", "start": 0, "end": 6}]
        assert await client.metric("weight_updates_total") == 1


async def test_the_weights_of_experts_are_pushed_under_their_own_names(tmp_path: Any) -> None:
    first, second = moe(tmp_path / "a"), moe(tmp_path / "b", seed=5)
    async with pushing(first) as (client, sender):
        assert (await sender.push(second.named(), "1"))[0] == 200
        assert await held(client) == checksum_of(second.named().items())


async def test_bfloat16_is_pushed_and_checked_as_it_is_held(oracle: Oracle, other: Oracle) -> None:
    cast = {n: t.to(torch.bfloat16) for n, t in other.named().items()}
    async with pushing(oracle, dtype="bfloat16") as (client, sender):
        assert (await sender.push(cast, "1"))[0] == 200
        assert await held(client) == checksum_of(cast.items())
        status, body = await sender.bucket(other.named())
        assert (status, "float32 was sent, bfloat16 is held" in body["message"]) == (400, True)


async def test_sampling_goes_on_during_a_push_with_the_old_weights_until_its_end(oracle: Oracle, other: Oracle) -> None:
    async with pushing(oracle) as (client, sender):
        assert (await client.post("/begin_weight_update"))[0] == 200
        assert (await sender.bucket(other.named(), weight_version="1", flush_cache=False))[0] == 200
        assert await held(client) == checksum_of(oracle.named().items()), "received, not live"
        assert await version(client) == "0"
        body = await client.generate(prompt(5), 4)
        assert body["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
        assert (await client.post("/end_weight_update"))[0] == 200
        meta = (await client.generate(prompt(5) + body["output_ids"], 4))["meta_info"]
        assert meta["cached_tokens"] == 8
        assert meta["kv_versions"] == [{"version": "0", "start": 0, "end": 8}, {"version": "1", "start": 8, "end": 12}]


@pytest.mark.parametrize(
    ("change", "why", "received"),
    [
        ({"names": ["model.nothing.weight"]}, "model.nothing.weight is not a weight of this model", True),
        ({"names": ["lm_head.weight"]}, "the embeddings are tied", True),
        ({"shapes": [[4, 8]]}, "shape [4, 8] was sent, [32] is held", True),
        ({"dtypes": ["bfloat16"], "shapes": [[64]]}, "bfloat16 was sent, float32 is held", True),
        ({"weight_version": "v2"}, "not a policy version", True),
        ({"load_format": "direct"}, "flattened_bucket", True),
        ({"abort_all_requests": True}, "never aborts", True),
        ({"dtypes": ["int8"]}, "int8 was sent", False),
        ({"names": ["model.norm.weight"] * 2}, "2 names, 1 dtypes", False),
        ({"shapes": [[-32]]}, "shape [-32]", False),
        ({"shapes": [[10**9]]}, "shape [1000000000]", False),
        ({"names": [], "dtypes": [], "shapes": []}, "0 names", False),
        ({"group_name": "nobody"}, "Group nobody not in ['push']", False),
    ],
)
async def test_a_bad_bucket_leaves_weights_version_and_engine_as_they_were(
    oracle: Oracle, change: dict[str, Any], why: str, received: bool
) -> None:
    """`received`: its size makes sense, so the collective is completed all the same and no other engine hangs."""
    good = {"model.norm.weight": torch.ones(32)}
    async with pushing(oracle) as (client, sender):
        assert (await client.post("/begin_weight_update"))[0] == 200
        call = client.post("/update_weights_from_distributed", {**announcement(good), **change})
        if received:
            (status, body), _ = await asyncio.gather(call, asyncio.to_thread(sender.groups["push"].broadcast, list(good.values())))
        else:
            status, body = await call
        assert (status, body["success"]) == (400, False)
        assert why in body["message"]
        status, body = await client.post("/end_weight_update")
        assert (status, "thrown away" in body["message"]) == (400, True)
        assert await held(client) == checksum_of(oracle.named().items())
        assert await version(client) == "0"
        assert len((await client.generate(prompt(5), 3))["output_ids"]) == 3
        assert (await sender.push(oracle.named(), "1"))[0] == 200, "the group is still good"


async def test_an_incomplete_push_is_thrown_away(oracle: Oracle, other: Oracle) -> None:
    partial = other.named()
    partial.pop("model.norm.weight")
    async with pushing(oracle) as (client, sender):
        status, body = await sender.push(partial, "1")
        assert (status, "1 tensors never came: model.norm.weight" in body["message"]) == (400, True)
        assert await held(client) == checksum_of(oracle.named().items())
        status, body = await client.post("/end_weight_update")
        assert (status, "without begin" in body["message"]) == (400, True)


async def test_a_bucket_without_begin_is_live_at_once(oracle: Oracle) -> None:
    norm = {"model.norm.weight": torch.full((32,), 0.5)}
    async with pushing(oracle) as (client, sender):
        assert (await sender.bucket(norm, weight_version="4"))[0] == 200
        assert await held(client) == checksum_of({**oracle.named(), **norm}.items())
        assert await version(client) == "4"


async def test_cases_28_a_push_left_open_by_a_dead_trainer_blocks_nobody(oracle: Oracle, other: Oracle) -> None:
    """The first trainer announces a bucket and goes away; the next one forms its own group and pushes while that call hangs."""
    async with pushing(oracle) as (client, sender):
        await client.post("/begin_weight_update")
        stuck = asyncio.create_task(client.post("/update_weights_from_distributed", announcement(other.named())))
        await client.until(lambda: client.engine.groups.receiving == 1)
        await sender.join("next")
        assert (await client.post("/begin_weight_update"))[0] == 200
        assert (await sender.bucket(other.named(), group="next", weight_version="1"))[0] == 200
        assert (await client.post("/end_weight_update"))[0] == 200
        assert await held(client) == checksum_of(other.named().items())
        assert not stuck.done()
        stuck.cancel()
        await client.until(lambda: client.engine.groups.receiving == 0)


async def test_a_trainer_that_dies_mid_broadcast_costs_the_push_alone(oracle: Oracle, other: Oracle) -> None:
    async with pushing(oracle, timeout=2.0) as (client, sender):
        await client.post("/begin_weight_update")
        call = asyncio.create_task(client.post("/update_weights_from_distributed", announcement(other.named())))
        await client.until(lambda: client.engine.groups.receiving == 1)
        sender.groups.pop("push").close()
        status, body = await call
        assert (status, "Failed to receive weights" in body["message"]) == (400, True)
        assert (await client.post("/end_weight_update"))[0] == 400
        assert await held(client) == checksum_of(oracle.named().items())
        client.engine.groups.timeout = 30.0
        await sender.join("push")
        assert (await sender.push(other.named(), "1"))[0] == 200


async def test_groups_come_and_go_over_an_engines_life(oracle: Oracle, other: Oracle) -> None:
    async with pushing(oracle) as (client, sender):
        await sender.join("second")
        for i, name in enumerate(("push", "second", "push"), 1):
            assert (await sender.bucket((oracle, other)[i % 2].named(), group=name, weight_version=str(i)))[0] == 200
        assert (await client.post("/destroy_weights_update_group", {"group_name": "push"}))[0] == 200
        status, body = await client.post("/destroy_weights_update_group", {"group_name": "push"})
        assert (status, body["message"]) == (400, "The group to be destroyed does not exist.")
        for change in ({"backend": "nccl"}, {"rank_offset": 0}, {"rank_offset": 2}, {"master_port": 1}):
            order = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
            client.engine.groups.timeout = 0.2
            assert (await client.post("/init_weights_update_group", {**order, "group_name": "bad", **change}))[0] == 400


async def test_a_paused_engine_takes_a_push_and_goes_on_in_a_new_span(oracle: Oracle, other: Oracle) -> None:
    async with pushing(oracle) as (client, sender):
        running = await client.frozen("long", generate_body(prompt(8), 20), 6)
        assert (await sender.push(other.named(), "1"))[0] == 200
        await client.post("/continue_generation")
        _, body = await running
        meta = body["meta_info"]
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}, {"version": "1", "start": 6, "end": 20}]
        old, new = (o.logprobs(prompt(8), body["output_ids"]) for o in (oracle, other))
        truth = torch.cat([old[:6], new[6:]])
        assert float((truth - torch.tensor([row[0] for row in meta["output_token_logprobs"]])).abs().max()) < 1e-5
        assert "kv_versions" not in meta, "the push asked for a flush: every row is by the new weights"


async def test_the_pusher_brings_two_engines_to_a_version_and_a_dead_one_does_not_stop_it(oracle: Oracle, other: Oracle) -> None:
    async with tiny_server(oracle) as one, tiny_server(oracle) as two, Pusher(bucket_bytes=8192, timeout=30.0, call_timeout=5.0) as pusher:
        engines = {"engine0-a": one.url, "engine1-b": two.url}
        outcome = await pusher.push(1, other.named(), engines)
        assert [(r.generation, r.ok, r.error) for r in outcome.results] == [("engine0-a", True, ""), ("engine1-b", True, "")]
        for client in (one, two):
            assert await version(client) == "1"
            assert await held(client) == checksum_of(other.named().items())
            assert await client.metric("paused") == 0
            assert (await client.generate(prompt(5), 3))["meta_info"]["weight_version"] == "1"
        engines["engine1-b"] = "http://127.0.0.1:1"
        outcome = await pusher.push(2, oracle.named(), engines)
        assert [(r.generation, r.ok) for r in outcome.results] == [("engine0-a", True), ("engine1-b", False)]
        assert await held(one) == checksum_of(oracle.named().items())
