"""The broadcast group of one plan: the trainer as rank 0, every engine in its seat.

Trainer and engines must act at the same time: each call goes to all engines while the trainer's own part runs in a thread.
When one of them fails the whole act has failed, and the group with it. A direct plan has a second group, of experts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping

from torch import Tensor

from rl360.engines.collective import Backend, Collective
from rl360.engines.contract import InitWeightsGroup, UpdateFromDistributed
from rl360.engines.expert_group import ExpertGroup, Holders
from rl360.engines.plan import Bucket, PushPlan
from rl360.engines.together import Clients, detached, on_all, together

log = logging.getLogger(__name__)


class WeightGroup:
    """Made by `form`; usable for pushes of its plan until something breaks."""

    def __init__(self, plan: PushPlan, collective: Collective, experts: ExpertGroup | None) -> None:
        self.plan, self._collective, self._experts = plan, collective, experts
        self.closed = False

    @classmethod
    async def form(
        cls, plan: PushPlan, clients: Clients, holders: Holders | None, *, host: str, backend: Backend, timeout: float
    ) -> WeightGroup:
        """Gather the plan's engines. Raises Broken when one doesn't come within `timeout` seconds.

        `holders`: the trainer's ranks, for a plan that sends experts straight from them.
        """
        name = f"rl360-{plan.digest[:12]}-{secrets.token_hex(4)}"
        collective = await asyncio.to_thread(Collective, host, name, plan.world, backend=backend, timeout=timeout)
        joins = {
            seat.generation: clients[seat.generation].join_group(
                InitWeightsGroup(
                    master_address=host,
                    master_port=collective.port,
                    rank_offset=seat.rank,
                    world_size=plan.world,
                    group_name=name,
                    backend=backend,
                )
            )
            for seat in plan.seats
        }
        try:
            await together(joins, detached(collective.connect))
            if not plan.sends:
                return cls(plan, collective, None)
            assert holders is not None  # who plans to send experts has them
            return cls(plan, collective, await ExpertGroup.form(plan, clients, holders, host=host, backend=backend, timeout=timeout))
        except BaseException:
            collective.close()
            raise

    async def send_experts(self, version: int, clients: Clients) -> None:
        """Let the ranks that hold experts send those of `version`, where the plan says so. Raises Broken, and the group is closed."""
        if self._experts is None:
            return
        try:
            await self._experts.send(version, clients)
        except BaseException:
            self.close()
            raise

    async def send(self, bucket: Bucket, weights: Mapping[str, Tensor], clients: Clients, *, flush_cache: bool) -> None:
        """Broadcast one bucket to all engines. Raises Broken, and the group is closed."""
        request = UpdateFromDistributed(
            names=[s.name for s in bucket.shards],
            dtypes=[s.dtype for s in bucket.shards],
            shapes=[list(s.shape) for s in bucket.shards],
            group_name=self._collective.name,
            flush_cache=flush_cache,
        )
        tensors = [weights[s.name] for s in bucket.shards]
        calls = {g: clients[g].receive(request) for g in self.plan.generations}
        try:
            await together(calls, detached(lambda: self._collective.broadcast(tensors)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the group up, without a word to the engines."""
        self.closed = True
        self._collective.close()
        if self._experts is not None:
            self._experts.close()

    async def dissolve(self, clients: Clients, *, timeout: float) -> None:
        """Close the group and tell those of its engines that are among `clients`; nobody waits for an answer beyond `timeout`."""
        self.close()
        told = {g: c for g, c in clients.items() if g in self.plan.generations}
        for name in (self._collective.name, *([self._experts.name] if self._experts else [])):
            _, faults = await on_all(told, lambda c, name=name: c.leave_group(name, timeout=timeout))
            for error in faults.values():
                log.info("group %s: %s", name, error)
