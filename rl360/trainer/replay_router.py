"""Routing replay in the trainer (S11): every router uses the experts that the sampler used, in the forward and in its recompute.

megatron's router asks an object of its own for the top-k; this one answers with recorded experts. It returns the router's own scores of
those experts, from which megatron makes the gate weights: so gradients reach the router. megatron's RouterReplay does the same by lists
that all models of a process share; here each model has its own. Beside it the router's own choice is counted where it differs.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rl360.trainer.batch import PackedBatch
from rl360.trainer.expert_rows import ReplayError
from rl360.trainer.layout import Layout, part

Choice = tuple[Tensor, Tensor]
"""Scores [t, topk] and ids int64 [t, topk] of the chosen experts."""


@dataclass
class Choices:
    """Recorded rows (of a token in a layer) that a training forward replayed, and in how many the router would have chosen otherwise."""

    rows: float = 0.0
    differ: float = 0.0


class RouterReplay:
    """The experts of a model's routers, microbatch by microbatch. `recomputed`: layers run again in the backward.

    Between tensor-parallel ranks a router sees its rank's run of the tokens alone.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, *, recomputed: bool) -> None:
        self._layout, self._recomputed = layout, recomputed
        self._routers: list[_Router] = []
        for layer in cast(Any, model).decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.router_replay = router = _Router()
                self._routers.append(router)

    @property
    def layers(self) -> int:
        """MoE layers of this model, or of this pipeline stage of it."""
        return len(self._routers)

    @contextmanager
    def forward(self, batch: PackedBatch) -> Generator[None]:
        """Around a microbatch's forward. A batch without experts lets routers choose for themselves (a reference's pass)."""
        by_layer = [None] * self.layers if batch.experts is None else list(self._own(batch.experts).unbind(1))
        if len(by_layer) != self.layers:
            raise ReplayError(f"experts of {len(by_layer)} layers for {self.layers} MoE layers")
        recorded = self._own(batch.recorded) if torch.is_grad_enabled() else None
        for router, rows in zip(self._routers, by_layer, strict=True):
            router.now, router.recorded, router.in_forward = rows, recorded, True
            if self._recomputed and torch.is_grad_enabled():
                router.again.append(rows)
        try:
            yield
        finally:
            for router in self._routers:
                router.now, router.in_forward = None, False

    def _own(self, rows: Tensor) -> Tensor:
        return part(rows, self._layout.tp_rank, self._layout.tp)

    def forget(self) -> None:
        """After a step: nothing is left to recompute."""
        for router in self._routers:
            router.again.clear()

    def take_choices(self) -> Choices:
        """Of the training forwards since the last call."""
        found = Choices()
        for router in self._routers:
            found.rows += sum(float(n) for n, _ in router.counted)
            found.differ += sum(float(n) for _, n in router.counted)
            router.counted.clear()
        return found


class _Router:
    """What one router asks. Backward passes come in the order of the forward ones, so a recompute takes the oldest rows left."""

    def __init__(self) -> None:
        self.now: Tensor | None = None
        self.recorded: Tensor | None = None  # bool [t]; None: don't count
        self.counted: list[tuple[Tensor, Tensor]] = []  # rows, of them different; on the device until somebody asks
        self.in_forward = False
        self.again: deque[Tensor | None] = deque()
        self.layer_number: int | None = None  # megatron writes it

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Choice] | None = None,
    ) -> Choice:
        """megatron's interface. `scores` [t, experts] are the router's own, with gradient."""
        assert default_compute_topk is not None
        rows = self.now if self.in_forward else self.again.popleft()
        if rows is None:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if rows.shape != (len(scores), topk):
            raise ReplayError(f"recorded experts {tuple(rows.shape)} for {len(scores)} tokens x {topk} in layer {self.layer_number}")
        chosen = rows.long()
        if self.in_forward and self.recorded is not None:
            _, own = default_compute_topk(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
            differ = (own.sort(1).values != chosen.sort(1).values).any(1) & self.recorded
            self.counted.append((self.recorded.sum(), differ.sum()))
        return scores.gather(1, chosen), chosen
