"""What a push plan costs on paper: bytes over each link, and seconds for given rates. Pure."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from rl360.engines.plan import PushPlan


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second: `broadcast` that a group of all GPUs takes in, `direct` between one rank and one GPU. `call`: seconds a call."""

    broadcast: float
    direct: float
    call: float


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine: `calls`; `bytes_gpu` into one of its GPUs. Of the trainer: `bytes_rank`, out of its busiest rank.

    `seconds` is None without rates.
    """

    path: str
    why: str
    calls: int
    bytes_engine: int
    bytes_gpu: int
    bytes_rank: int
    seconds: float | None


def cost(plan: PushPlan, rates: Rates | None) -> Cost:
    """The cost of a plan for engines of one size.

    A broadcast goes through the group like water through a pipe, whoever is in it: its bytes over its rate, and a call a bucket. Experts
    go from many ranks to many GPUs at once: the busiest link decides.
    """
    to_all = sum(b.bytes for b in plan.buckets)
    sent: dict[int, int] = defaultdict(int)
    received: dict[tuple[str, int], int] = defaultdict(int)
    for send in plan.sends:
        sent[send.rank] += send.bytes
        received[send.generation, send.gpu] += send.bytes
    into_one = max(received.values(), default=0)
    out_of_one = max(sent.values(), default=0)
    calls = max((s.calls for s in plan.seats), default=0)
    seconds = None
    if rates is not None:
        seconds = to_all / rates.broadcast + max(into_one, out_of_one) / rates.direct + calls * rates.call
    return Cost(
        path=plan.path,
        why=plan.why,
        calls=calls,
        bytes_engine=max((s.bytes for s in plan.seats), default=0),
        bytes_gpu=to_all + into_one,
        bytes_rank=max(to_all, out_of_one),
        seconds=seconds,
    )
