"""Which tasks a step trains on: a pure function of pool, seed and step, so a resumed run skips nothing (CASES 38)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rl360.bus.blobs import digest_of


class TaskRef(msgspec.Struct, frozen=True, kw_only=True):
    """A task as the scheduler knows it. Its own clocks are seconds; infinite: the recipe's alone decide."""

    name: str
    digest: str  # of the task's directory
    domain: str
    agent_timeout: float = math.inf
    verifier_timeout: float = math.inf


def draw(pool: Sequence[TaskRef], *, seed: int, step: int, count: int) -> list[TaskRef]:
    """Tasks of a step: epochs of the whole pool, each in its own order, cut into pieces of `count`.

    The order of an epoch depends on seed and names only, not on the order of `pool`. Raises ValueError for an empty pool.
    """
    if not pool:
        raise ValueError("no task to draw from: tasks/train is empty")
    places = range(step * count, (step + 1) * count)
    orders = {epoch: _order(pool, seed, epoch) for epoch in {p // len(pool) for p in places}}
    return [orders[p // len(pool)][p % len(pool)] for p in places]


def _order(pool: Sequence[TaskRef], seed: int, epoch: int) -> list[TaskRef]:
    return sorted(pool, key=lambda task: digest_of(f"{seed}/{epoch}/{task.name}".encode()))
