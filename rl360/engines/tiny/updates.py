"""Hot weight updates: all-or-nothing loading between `begin` and `end`.

Weights arrive in a staging copy while the engine goes on; only a complete one is swapped in, between two steps. A bucket that
is refused is still received and thrown away when its size makes sense, so that the other engines of the group don't hang.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from torch import Tensor

from rl360.engines.contract import ExpertPart, UpdateExperts, UpdateFromDistributed
from rl360.engines.tiny import buckets
from rl360.engines.tiny.groups import GroupError, Groups
from rl360.engines.tiny.loop import EngineLoop
from rl360.engines.tiny.weights import Weights

T = TypeVar("T")
_log = logging.getLogger("rl360.engine")


class UpdateError(Exception):
    """An update that was refused or failed. The live weights are what they were."""


class _Staging:
    """A model being received."""

    def __init__(self, live: Weights) -> None:
        self.weights = Weights(live.shape, live.dtype)
        self.missing = set(self.weights.named)
        self.flush = False
        self.version: str | None = None
        self.failed = ""

    def received(self, bucket: UpdateFromDistributed) -> None:
        self.missing.difference_update(bucket.names)
        self.flush = self.flush or bucket.flush_cache
        self.version = bucket.weight_version or self.version

    def fail(self, why: str) -> None:
        """The first reason counts: an update of which a part is missing is thrown away whole."""
        self.failed = self.failed or why


class Updates:
    """Update calls of one engine."""

    def __init__(self, loop: EngineLoop, groups: Groups) -> None:
        self._loop, self._groups = loop, groups
        self._staging: _Staging | None = None

    @property
    def live(self) -> Weights:
        """The weights that sampling uses; never written once they are live."""
        return self._loop.scheduler.model.weights

    def begin(self) -> None:
        """Open a session. One that a dead pusher left open is thrown away: nobody waits for it (CASES 28)."""
        if self._staging is not None:
            _log.warning("a weight update that was begun and never ended is thrown away")
        self._staging = _Staging(self.live)

    async def update(self, bucket: UpdateFromDistributed) -> None:
        """Receive a bucket: into the open session, or, without one, live at once. Raises UpdateError; nothing is part-written."""
        staging = self._staging
        try:
            flat = await self._receive(bucket)
        except UpdateError as e:
            if staging is not None:
                staging.fail(str(e))
            raise
        if staging is not self._staging:
            raise UpdateError("the update that this bucket belongs to is over")
        weights = await asyncio.to_thread(_written, staging.weights if staging else self.live.clone(), bucket, flat)
        if staging is not None:
            staging.received(bucket)
        else:
            await self._swap(weights, bucket.weight_version, bucket.flush_cache)

    async def update_experts(self, order: UpdateExperts) -> None:
        """Receive experts from the ranks that hold them into the open session. Raises UpdateError; nothing is part-written."""
        staging = self._staging
        if staging is None:
            raise UpdateError("experts come between begin_weight_update() and end_weight_update() only")
        try:
            flats = await self._receive_parts(order)
        except UpdateError as e:
            staging.fail(str(e))
            raise
        if staging is not self._staging:
            raise UpdateError("the update that these experts belong to is over")
        for part, flat in zip(order.parts, flats, strict=True):
            await asyncio.to_thread(_written, staging.weights, part, flat)
            staging.missing.difference_update(part.names)

    async def end(self) -> None:
        """Swap the staged model in, or raise UpdateError and keep the old one when any bucket failed or a tensor is missing."""
        staging, self._staging = self._staging, None
        if staging is None:
            raise UpdateError("end_weight_update() without begin_weight_update()")
        if staging.failed:
            raise UpdateError(f"the update is thrown away, a bucket failed: {staging.failed}")
        if staging.missing:
            raise UpdateError(f"the update is thrown away, {len(staging.missing)} tensors never came: {min(staging.missing)} first")
        await self._swap(staging.weights, staging.version, staging.flush)

    async def _receive(self, bucket: UpdateFromDistributed) -> Tensor:
        why = buckets.refusal(bucket, self.live)
        return await self._taken(why, [bucket], lambda sizes: self._groups.receive(bucket.group_name, sizes[0]))

    async def _receive_parts(self, order: UpdateExperts) -> list[Tensor]:
        why = buckets.experts_refusal(order, self.live, self._groups.ranks)
        if why and not all(0 <= part.gpu < self._groups.ranks for part in order.parts):
            raise UpdateError(why)

        def receive(sizes: list[int]) -> Awaitable[list[Tensor]]:
            parts = [(part.source, part.gpu, size) for part, size in zip(order.parts, sizes, strict=True)]
            return self._groups.receive_from(order.group_name, parts)

        return await self._taken(why, order.parts, receive)

    async def _taken(self, why: str, parts: Sequence[buckets.Tensors], receive: Callable[[list[int]], Awaitable[T]]) -> T:
        """Receive tensors of these sizes, also what is refused (`why`) when its size makes sense. Raises UpdateError."""
        sizes = [size for part in parts if (size := buckets.declared_bytes(part)) is not None]
        if len(sizes) < len(parts) or sum(sizes) > max(buckets.SIZES.values()) * self.live.elements:
            raise UpdateError(why)
        try:
            got = await receive(sizes)
        except GroupError as e:
            raise UpdateError(str(e)) from None
        if why:
            raise UpdateError(why)
        return got

    async def _swap(self, weights: Weights, version: str | None, flush: bool) -> None:
        scheduler = self._loop.scheduler
        await asyncio.wrap_future(self._loop.call(lambda: scheduler.swap(weights, version, flush=flush)))


def _written(weights: Weights, bucket: UpdateFromDistributed | ExpertPart, flat: Tensor) -> Weights:
    """`weights`, with the bucket's tensors copied in."""
    for name, tensor in buckets.tensors_of(bucket, flat):
        weights.write(name, tensor)
    return weights
