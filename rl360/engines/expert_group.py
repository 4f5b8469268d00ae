"""The experts' group of a direct plan: the trainer ranks that hold experts, then every GPU. Experts go from rank to GPU, past rank 0."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from rl360.engines import collective
from rl360.engines.collective import Backend
from rl360.engines.contract import ExpertPart, InitWeightsGroup, UpdateExperts
from rl360.engines.expert_rank import JoinExperts, Order, SendExperts
from rl360.engines.plan import PushPlan
from rl360.engines.together import Clients, together


class Holders(Protocol):
    """The trainer's ranks, each of which holds some experts."""

    async def do(self, orders: Mapping[int, Order]) -> None:
        """Let each of these ranks carry out its order, all at once. Raises RuntimeError, which names a rank that could not."""
        ...


class ExpertGroup:
    """Made by `form`; usable for pushes of its plan until something breaks."""

    def __init__(self, plan: PushPlan, holders: Holders, name: str, store: Any, timeout: float) -> None:
        self.name = name
        self._plan, self._holders, self._store, self._timeout = plan, holders, store, timeout
        self._source = {rank: i for i, rank in enumerate(plan.holders)}
        self._first = {seat.generation: len(plan.holders) + seat.rank - 1 for seat in plan.seats}

    @classmethod
    async def form(cls, plan: PushPlan, clients: Clients, holders: Holders, *, host: str, backend: Backend, timeout: float) -> ExpertGroup:
        """Gather ranks and engines. Raises Broken when one doesn't come within `timeout` seconds."""
        name = f"rl360-{plan.digest[:12]}-experts-{secrets.token_hex(4)}"
        store = await asyncio.to_thread(collective.rendezvous, host, timedelta(seconds=timeout))
        group = cls(plan, holders, name, store, timeout)
        world = len(plan.holders) + plan.world - 1
        join = JoinExperts(host=host, port=store.port, name=name, rank=0, world=world, backend=backend, timeout=timeout)
        orders = {rank: msgspec.structs.replace(join, rank=i) for rank, i in group._source.items()}
        calls = {
            generation: clients[generation].join_group(
                InitWeightsGroup(
                    master_address=host, master_port=store.port, rank_offset=first, world_size=world, group_name=name, backend=backend
                )
            )
            for generation, first in group._first.items()
        }
        await together(calls, holders.do(orders))
        return group

    async def send(self, version: int, clients: Clients) -> None:
        """Experts of `version`, from every rank to every GPU at once. Raises Broken."""
        calls = {g: clients[g].receive_experts(self._parts(g)) for g in self._first}
        await together(calls, self._holders.do({rank: self._order(rank, version) for rank in self._source}))

    def close(self) -> None:
        """Give the group up, without a word to anybody."""
        self._store = None

    def _parts(self, generation: str) -> UpdateExperts:
        mine = (s for s in self._plan.sends if s.generation == generation)
        parts = [
            ExpertPart(
                source=self._source[s.rank],
                gpu=s.gpu,
                names=[w.name for w in s.shards],
                dtypes=[w.dtype for w in s.shards],
                shapes=[list(w.shape) for w in s.shards],
            )
            for s in mine
        ]
        return UpdateExperts(parts=parts, group_name=self.name)

    def _order(self, rank: int, version: int) -> SendExperts:
        mine = (s for s in self._plan.sends if s.rank == rank)
        to = tuple((self._first[s.generation] + s.gpu, tuple(w.name for w in s.shards)) for s in mine)
        return SendExperts(name=self.name, version=version, to=to, timeout=self._timeout)
