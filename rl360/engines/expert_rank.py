"""A trainer rank's part of the direct path: it keeps the experts that it exported and sends them to the GPUs that serve them. Blocking."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
from torch import Tensor

from rl360.engines import collective
from rl360.engines.collective import Backend


class JoinExperts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Join the experts' group of a plan as `rank` of `world`; the group before it is given up."""

    host: str
    port: int
    name: str
    rank: int
    world: int
    backend: Backend
    timeout: float  # seconds, of each call over the group


class SendExperts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send experts of `version`: to each (rank of the group) the weights of these names, as one flat tensor."""

    name: str
    version: int
    to: tuple[tuple[int, tuple[str, ...]], ...]
    timeout: float


Order = JoinExperts | SendExperts


class ExpertRank:
    """One trainer rank, apart from the training that it does beside: weights that it holds are never written."""

    def __init__(self) -> None:
        self._version = -1
        self._weights: Mapping[str, Tensor] = {}
        self._group: tuple[JoinExperts, Any] | None = None

    def hold(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Keep this rank's experts of `version`, by HF name in the engines' dtype, in place of those before."""
        self._version, self._weights = version, weights

    def perform(self, order: Order) -> None:
        """Raises RuntimeError when the others don't take part in time, or what is to be sent isn't held."""
        match order:
            case JoinExperts():
                self._group = None
                o, timeout = order, timedelta(seconds=order.timeout)
                self._group = o, collective.join(o.host, o.port, o.name, o.rank, o.world, backend=o.backend, timeout=timeout)
            case SendExperts():
                self._send(order)

    def _send(self, order: SendExperts) -> None:
        if self._group is None or self._group[0].name != order.name:
            raise RuntimeError(f"group {order.name} was not joined")
        if order.version != self._version:
            raise RuntimeError(f"experts of version {order.version} are not held: those of {self._version} are")
        joined, group = self._group
        works = [
            group.send([collective.flatten([self._weights[n] for n in names], joined.backend)], to, collective.TAG)
            for to, names in order.to
        ]
        collective.finish(group, works, backend=joined.backend, timeout=timedelta(seconds=order.timeout), name=order.name)
