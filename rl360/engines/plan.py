"""Push plan: who sends which bytes to whom, for one set of engine generations. Pure.

Broadcast path: all weights go to every GPU, in buckets. Shared memory: the same buckets, mapped by the engines of the
trainer's own host; no collective. Direct path: non-expert weights go by the same buckets; each
trainer rank that holds an expert sends it straight to the GPU that serves it, in one more call an engine.
A plan belongs to one set of engines. When the set changes a new plan is built from the same inputs, so the direct
path is chosen again whenever it is possible: it can't be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import blake3
import msgspec

from rl360.bus import events as ev

_SHARED: Final = "the recipe says that the engines share the trainer's host: they map its memory"


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One weight as the trainer holds it: HF name, torch dtype name, size in bytes, and the rank that has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    expert: bool = False
    rank: int = 0


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine generation and its GPUs (a CPU engine counts as one)."""

    generation: str
    gpus: int = 1


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that are broadcast together, as one flat tensor, in this order."""

    shards: tuple[ShardSpec, ...]
    bytes: int


class ExpertSend(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that trainer rank `rank` sends straight to the GPUs of one engine."""

    rank: int
    generation: str
    shards: int
    bytes: int


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's place in the group: ranks [rank, rank + gpus), and what one push costs it.

    `bytes` is what arrives, summed over the engine's GPUs.
    """

    generation: str
    rank: int
    gpus: int
    calls: int
    bytes: int


class PushPlan(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    path: Literal["broadcast", "direct", "shared_memory"]
    why: str
    buckets: tuple[Bucket, ...]
    sends: tuple[ExpertSend, ...]
    seats: tuple[Seat, ...]

    @property
    def world(self) -> int:
        """Ranks of the group, where there is one: the trainer's rank 0, and one a GPU."""
        return 1 + sum(s.gpus for s in self.seats)

    @property
    def generations(self) -> tuple[str, ...]:
        return tuple(s.generation for s in self.seats)

    def event(self, run: str, step: int) -> ev.PlanBuilt:
        shares = tuple(ev.EngineShare(generation=s.generation, calls=s.calls, bytes=s.bytes) for s in self.seats)
        return ev.PlanBuilt(run=run, step=step, plan=self.digest, generations=self.generations, path=self.path, why=self.why, shares=shares)


def plan_push(
    shards: Sequence[ShardSpec],
    engines: Sequence[EngineSpec],
    bucket_bytes: int,
    *,
    place_experts: bool = False,
    shared_memory: bool = False,
) -> PushPlan:
    """Plan a push of `shards` to `engines` in buckets of at most `bucket_bytes`.

    `place_experts`: trainer and engines both know which GPU serves which expert, so experts can go direct.
    `shared_memory`: the recipe says that all engines are on the trainer's host and map its memory.
    The same inputs give the same plan and digest, in whatever order the engines are named.
    """
    engines = sorted(engines, key=lambda e: e.generation)
    _check(shards, engines, bucket_bytes)
    experts = [s for s in shards if s.expert]
    rest = [s for s in shards if not s.expert]
    direct = place_experts and bool(experts) and not shared_memory
    shared = tuple(_buckets(rest, bucket_bytes))
    buckets = shared if direct else (*shared, *_buckets(experts, bucket_bytes))
    to_all = sum(b.bytes for b in buckets)
    to_one = sum(s.bytes for s in experts) if direct else 0
    return PushPlan(
        digest=_digest(shards, engines, bucket_bytes, place_experts, shared_memory),
        path="shared_memory" if shared_memory else "direct" if direct else "broadcast",
        why=_SHARED if shared_memory else _why(direct, bool(experts), len(buckets)),
        buckets=buckets,
        sends=tuple(_sends(experts, engines)) if direct else (),
        seats=tuple(_seats(engines, calls=len(buckets) + direct, to_all=to_all, to_one=to_one)),
    )


def _check(shards: Sequence[ShardSpec], engines: Sequence[EngineSpec], bucket_bytes: int) -> None:
    twice = [name for name, n in Counter(s.name for s in shards).items() if n > 1]
    twice += [name for name, n in Counter(e.generation for e in engines).items() if n > 1]
    if twice:
        raise ValueError(f"named twice in one push: {', '.join(sorted(twice)[:5])}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}: it must be at least 1")


def _buckets(shards: Iterable[ShardSpec], limit: int) -> Iterator[Bucket]:
    """Fill buckets in order. A weight is never split; one that is larger than a bucket travels alone."""
    filling: list[ShardSpec] = []
    size = 0
    for shard in shards:
        if filling and size + shard.bytes > limit:
            yield Bucket(shards=tuple(filling), bytes=size)
            filling, size = [], 0
        filling.append(shard)
        size += shard.bytes
    if filling:
        yield Bucket(shards=tuple(filling), bytes=size)


def _sends(experts: Sequence[ShardSpec], engines: Sequence[EngineSpec]) -> Iterator[ExpertSend]:
    held: dict[int, list[ShardSpec]] = {}
    for shard in experts:
        held.setdefault(shard.rank, []).append(shard)
    for engine in engines:
        for rank, mine in sorted(held.items()):
            yield ExpertSend(rank=rank, generation=engine.generation, shards=len(mine), bytes=sum(s.bytes for s in mine))


def _seats(engines: Sequence[EngineSpec], *, calls: int, to_all: int, to_one: int) -> Iterator[Seat]:
    rank = 1
    for e in engines:
        yield Seat(generation=e.generation, rank=rank, gpus=e.gpus, calls=calls, bytes=to_all * e.gpus + to_one)
        rank += e.gpus


def _why(direct: bool, experts: bool, buckets: int) -> str:
    if direct:
        return f"experts go straight to the GPUs that serve them; the rest in {buckets} broadcast buckets"
    if experts:
        return "trainer and engines can't place experts: every weight goes to every GPU"
    return "the model has no experts: every weight goes to every GPU"


def _digest(shards: Sequence[ShardSpec], engines: Sequence[EngineSpec], bucket_bytes: int, place_experts: bool, shared_memory: bool) -> str:
    return blake3.blake3(msgspec.msgpack.encode((shards, engines, bucket_bytes, place_experts, shared_memory))).hexdigest()
