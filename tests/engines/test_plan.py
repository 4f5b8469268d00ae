"""The push plan: pure, complete, rebuilt for every set of engines, on paper for a 375B model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.engines.plan import EngineSpec, PushPlan, ShardSpec, plan_push

MIB = 1024**2


def shard(name: str, *shape: int, expert: int | None = None, rank: int = 0) -> ShardSpec:
    size = 2
    for d in shape:
        size *= d
    return ShardSpec(name=name, dtype="bfloat16", shape=shape, bytes=size, expert=expert, rank=rank)


def model_375b() -> list[ShardSpec]:
    """61 layers, 3 of them dense, 144 experts in the others, spread over 72 trainer ranks: 756 GB, 20 GB of it not experts."""
    hidden, heads, kv, vocab, dense, moe = 7168, 56 * 128, 8 * 128, 100352, 20480, 2048
    shards = [shard("embed", vocab, hidden)]
    for layer in range(61):
        shards += [shard(f"{layer}.q", heads, hidden), shard(f"{layer}.k", kv, hidden)]
        shards += [shard(f"{layer}.v", kv, hidden), shard(f"{layer}.o", hidden, heads)]
        if layer < 3:
            shards += [shard(f"{layer}.{part}", dense, hidden) for part in ("gate", "up", "down")]
            continue
        shards.append(shard(f"{layer}.router", 144, hidden))
        for e in range(144):
            shards += [shard(f"{layer}.experts.{e}.{p}", moe, hidden, expert=e, rank=e % 72) for p in ("gate", "up", "down")]
    return [*shards, shard("head", vocab, hidden)]


def engines(*names: str, gpus: int = 8) -> list[EngineSpec]:
    return [EngineSpec(generation=n, gpus=gpus, ep=gpus) for n in names]


def test_375b_takes_41_calls_an_engine_direct_and_1432_by_broadcast() -> None:
    shards = model_375b()
    total, rest = sum(s.bytes for s in shards), sum(s.bytes for s in shards if s.expert is None)
    assert (round(total / 1e9), round(rest / 1e9)) == (756, 20)

    direct = plan_push(shards, engines("a", "b"), 512 * MIB, place_experts=True)
    broadcast = plan_push(shards, engines("a", "b"), 512 * MIB)
    assert (direct.path, [s.calls for s in direct.seats]) == ("direct", [41, 41])
    assert (broadcast.path, [s.calls for s in broadcast.seats]) == ("broadcast", [1432, 1432])
    assert [s.bytes for s in direct.seats] == [8 * rest + total - rest] * 2, "an expert lives on one GPU of each engine"
    assert [s.bytes for s in broadcast.seats] == [8 * total] * 2
    assert len(direct.sends) == 2 * 72 * 2 and direct.holders == tuple(range(72)), "two experts a rank and layer, each of another GPU"
    assert sum(s.bytes for s in direct.sends) == 2 * (total - rest)
    assert "broadcast buckets" in direct.why and "the recipe asks for it" in broadcast.why


def test_the_direct_path_is_never_retired() -> None:
    """An engine leaves, a replacement joins, another leaves: each set gets its own plan, on the direct path."""
    shards = [shard("w", 4), *(shard(f"x.experts.{e}.up", 4, expert=e) for e in range(8))]
    sets = [("a", "b"), ("a",), ("a", "c"), ("c",), ("c", "d")]
    plans = [plan_push(shards, engines(*names), MIB, place_experts=True) for names in sets]
    assert [p.path for p in plans] == ["direct"] * 5
    assert len({p.digest for p in plans}) == 5
    assert [p.generations for p in plans] == sets


def test_a_dense_model_goes_by_broadcast_and_says_why() -> None:
    plan = plan_push([shard("w", 4)], engines("a"), MIB, place_experts=True)
    assert plan.path == "broadcast" and "no experts" in plan.why and plan.sends == ()


def test_experts_that_no_gpu_has_whole_go_by_broadcast_and_the_plan_says_why() -> None:
    shards = [shard("w", 4), *(shard(f"x.experts.{e}.up", 4, expert=e) for e in range(8))]
    for spec in (EngineSpec(generation="a", gpus=4, ep=2), EngineSpec(generation="a", gpus=3, ep=3)):
        plan = plan_push(shards, [spec], MIB, place_experts=True)
        assert plan.path == "broadcast" and f"a spreads 8 experts over {spec.gpus} GPUs in {spec.ep} groups" in plan.why
    plan = plan_push(shards, engines("a"), MIB, place_experts=False, unable="SGLang 0.5.17 takes no weights from several ranks")
    assert plan.path == "broadcast" and plan.why.startswith("SGLang 0.5.17 takes no weights")


def test_no_engines_make_a_plan_without_seats() -> None:
    plan = plan_push([shard("w", 4)], [], MIB)
    assert (plan.seats, plan.world) == ((), 1)


def test_names_and_generations_are_unique() -> None:
    with pytest.raises(ValueError, match=r"named twice.*w"):
        plan_push([shard("w", 4), shard("w", 4)], engines("a"), MIB)
    with pytest.raises(ValueError, match=r"named twice.*a"):
        plan_push([shard("w", 4)], engines("a", "a"), MIB)
    with pytest.raises(ValueError, match="bucket_bytes"):
        plan_push([shard("w", 4)], engines("a"), 0)


shapes = st.lists(st.tuples(st.integers(1, 60), st.none() | st.integers(0, 5), st.integers(0, 3)), max_size=30)
names = st.lists(st.sampled_from("abcdef"), unique=True)


def build(made: list[tuple[int, int | None, int]], who: list[str], limit: int, place: bool) -> tuple[list[ShardSpec], PushPlan]:
    shards = [shard(f"w{i}", n, expert=expert, rank=rank) for i, (n, expert, rank) in enumerate(made)]
    return shards, plan_push(
        shards, [EngineSpec(generation=n, gpus=(gpus := 1 + ord(n) % 3), ep=gpus) for n in who], limit, place_experts=place
    )


@given(shapes, names, st.integers(1, 200), st.booleans())
def test_every_weight_goes_to_every_engine_exactly_once_in_bounded_buckets(
    made: list[tuple[int, int | None, int]], who: list[str], limit: int, place: bool
) -> None:
    shards, plan = build(made, who, limit, place)
    in_buckets = [s for b in plan.buckets for s in b.shards]
    experts = [s for s in shards if s.expert is not None]
    wanted = [s for s in shards if s.expert is None] if plan.path == "direct" else shards
    assert sorted(in_buckets, key=lambda s: s.name) == sorted(wanted, key=lambda s: s.name)
    assert all(b.bytes == sum(s.bytes for s in b.shards) and (b.bytes <= limit or len(b.shards) == 1) for b in plan.buckets)
    for seat in plan.seats:
        mine = [s for s in plan.sends if s.generation == seat.generation]
        sent = [w for s in mine for w in s.shards]
        assert sorted(w.name for w in sent) == sorted(w.name for w in experts) if plan.path == "direct" else not sent
        assert all(0 <= s.gpu < seat.gpus and {w.rank for w in s.shards} == {s.rank} for s in mine)
        assert seat.calls == len(plan.buckets) + (plan.path == "direct")


@given(shapes, names, st.integers(1, 200), st.booleans())
def test_the_plan_depends_on_its_inputs_alone_and_seats_fill_the_ranks(
    made: list[tuple[int, int | None, int]], who: list[str], limit: int, place: bool
) -> None:
    shards, plan = build(made, who, limit, place)
    assert plan == build(made, who[::-1], limit, place)[1]
    ranks = [r for s in plan.seats for r in range(s.rank, s.rank + s.gpus)]
    assert ranks == list(range(1, plan.world))
    if shards:
        assert plan.digest != plan_push(shards[1:], [EngineSpec(generation=n) for n in who], limit).digest
