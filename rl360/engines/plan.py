"""Push plan: who sends which bytes to whom, for one set of engine generations. Pure.

Broadcast path: all weights go to every GPU, in buckets. Shared memory: the same buckets, mapped by the engines of the
trainer's own host; no collective. Direct path: non-expert weights go by the same buckets; each
trainer rank that holds an expert sends it straight to the GPU that serves it, over a group of its own, in one more call an engine.
A plan belongs to one set of engines. When the set changes a new plan is built from the same inputs, so the direct
path is chosen again whenever it is possible: it can't be lost.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import blake3
import msgspec

from rl360.bus import events as ev

_EXPERT: Final = re.compile(r"\.experts\.([0-9]+)\.")
_SHARED: Final = "the recipe says that the engines share the trainer's host: they map its memory"


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One weight as the trainer holds it: HF name, torch dtype name, size in bytes, and the rank that has it.

    `expert`: the index of the expert that it is a part of; None: of none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    expert: int | None = None
    rank: int = 0


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine generation and its GPUs (a rank of a CPU engine counts as one); `ep` groups of them share out the experts."""

    generation: str
    gpus: int = 1
    ep: int = 1


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that are broadcast together, as one flat tensor, in this order."""

    shards: tuple[ShardSpec, ...]
    bytes: int


class ExpertSend(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that trainer rank `rank` sends straight to one GPU of one engine, as one flat tensor, in this order."""

    rank: int
    generation: str
    gpu: int
    shards: tuple[ShardSpec, ...]
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
    def holders(self) -> tuple[int, ...]:
        """Trainer ranks that send experts: ranks 0, 1, … of the experts' group, before the GPUs in the order of the seats."""
        return tuple(sorted({s.rank for s in self.sends}))

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
    unable: str = "",
) -> PushPlan:
    """Plan a push of `shards` to `engines` in buckets of at most `bucket_bytes`.

    `place_experts`: experts go straight to the GPUs that serve them, where that can be; `unable`: why these engines or trainer can't.
    `shared_memory`: the recipe says that all engines are on the trainer's host and map its memory.
    The same inputs give the same plan and digest, in whatever order the engines are named.
    """
    engines = sorted(engines, key=lambda e: e.generation)
    _check(shards, engines, bucket_bytes)
    experts = [s for s in shards if s.expert is not None]
    rest = [s for s in shards if s.expert is None]
    why = _SHARED if shared_memory else _all_to_all(experts, engines, place_experts, unable)
    direct = not why
    shared = tuple(_buckets(rest, bucket_bytes))
    buckets = shared if direct else (*shared, *_buckets(experts, bucket_bytes))
    to_all = sum(b.bytes for b in buckets)
    to_one = sum(s.bytes for s in experts) if direct else 0
    return PushPlan(
        digest=_digest(shards, engines, bucket_bytes, direct, shared_memory),
        path="shared_memory" if shared_memory else "direct" if direct else "broadcast",
        why=why or f"experts go straight to the GPUs that serve them; the rest in {len(buckets)} broadcast buckets",
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


def expert_of(name: str) -> int | None:
    """The expert that a weight is a part of, by its Hugging Face name; None: of none.

    >>> expert_of("model.layers.2.mlp.experts.17.up_proj.weight"), expert_of("model.layers.2.mlp.gate.weight")
    (17, None)
    """
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def serving(expert: int, experts: int, ep: int) -> int:
    """Which of `ep` GPUs serves an expert: contiguous runs, as SGLang lays them out.

    >>> [serving(e, 8, 2) for e in range(8)]
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    return expert // (experts // ep)


def _sends(experts: Sequence[ShardSpec], engines: Sequence[EngineSpec]) -> Iterator[ExpertSend]:
    count = _count(experts)
    for engine in engines:
        parts: dict[tuple[int, int], list[ShardSpec]] = {}
        for s in experts:
            assert s.expert is not None
            parts.setdefault((s.rank, serving(s.expert, count, engine.ep)), []).append(s)
        for (rank, gpu), mine in sorted(parts.items(), key=lambda p: p[0]):
            yield ExpertSend(rank=rank, generation=engine.generation, gpu=gpu, shards=tuple(mine), bytes=sum(s.bytes for s in mine))


def _count(experts: Sequence[ShardSpec]) -> int:
    """Experts of a layer."""
    return 1 + max((s.expert for s in experts if s.expert is not None), default=-1)


def _seats(engines: Sequence[EngineSpec], *, calls: int, to_all: int, to_one: int) -> Iterator[Seat]:
    rank = 1
    for e in engines:
        yield Seat(generation=e.generation, rank=rank, gpus=e.gpus, calls=calls, bytes=to_all * e.gpus + to_one)
        rank += e.gpus


def _all_to_all(experts: Sequence[ShardSpec], engines: Sequence[EngineSpec], place_experts: bool, unable: str) -> str:
    """Why every weight goes to every GPU; empty: experts can go direct."""
    if not experts:
        return "the model has no experts: every weight goes to every GPU"
    if unable or not place_experts:
        return f"{unable or 'the recipe asks for it'}: every weight goes to every GPU"
    split = next((why for e in engines if (why := splits(e, _count(experts)))), "")
    return f"{split}: every weight goes to every GPU" if split else ""


def splits(engine: EngineSpec, experts: int) -> str:
    """Why an engine has no GPU for each of `experts` experts of a layer; empty: it has."""
    if engine.ep == engine.gpus and experts % engine.ep == 0:
        return ""
    return (
        f"{engine.generation} spreads {experts} experts over {engine.gpus} GPUs in {engine.ep} groups, so that no GPU has an expert whole"
    )


def _digest(shards: Sequence[ShardSpec], engines: Sequence[EngineSpec], bucket_bytes: int, direct: bool, shared_memory: bool) -> str:
    return blake3.blake3(msgspec.msgpack.encode((shards, engines, bucket_bytes, direct, shared_memory))).hexdigest()
