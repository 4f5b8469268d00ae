"""The groups over which an engine receives weights: gloo, no default process group, several over its life.

An engine of several ranks joins with all of them, as one of several GPUs does: each takes part in every broadcast, and gets what is sent
to it alone. They share one process and one copy of what all ranks hold.

A collective call blocks and can't be aborted, so each runs in a thread of its own that ends by the group's timeout at the
latest. Giving a group up forgets it; a call under way keeps it alive until then, and nobody waits for that.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions

from rl360.engines import collective
from rl360.engines.contract import InitWeightsGroup

T = TypeVar("T")
W = TypeVar("W")


class GroupError(Exception):
    """A group can't be joined, isn't known, or failed."""


class Groups:
    """Groups by name. A call is answered within the timeout and a few seconds."""

    def __init__(self, timeout: float, ranks: int = 1) -> None:
        self.timeout, self.ranks = timeout, ranks  # seconds; ranks of this engine in each group
        self.receiving = 0  # calls that wait for weights now
        self.received = [0] * ranks  # bytes that came to each rank
        self._groups: dict[str, _Group] = {}

    async def join(self, order: InitWeightsGroup) -> None:
        """Join as ranks `rank_offset` on; returns when all ranks are there. One left over under the same name is given up."""
        if order.backend != "gloo":
            raise GroupError(f"backend {order.backend!r} is not served here: the tiny engine speaks gloo")
        if not 0 < order.rank_offset <= order.world_size - self.ranks:
            last = order.world_size - self.ranks
            raise GroupError(f"rank_offset {order.rank_offset} must lie in [1, {last}]: rank 0 is a sender, and {self.ranks} ranks join")
        self._groups.pop(order.group_name, None)
        timeout = timedelta(seconds=self.timeout)
        ranks = range(order.rank_offset, order.rank_offset + self.ranks)
        try:
            handles = await self._detached([partial(_rendezvous, order, rank, timeout) for rank in ranks])
        except (RuntimeError, TimeoutError) as e:
            raise GroupError(f"Failed to initialize custom process group: {e}") from None
        self._groups[order.group_name] = _Group(handles)

    def leave(self, name: str) -> None:
        if self._groups.pop(name, None) is None:
            raise GroupError("The group to be destroyed does not exist.")

    async def receive(self, name: str, size: int) -> Tensor:
        """One broadcast of `size` bytes from rank 0, in the order of the calls. A group that fails is given up."""
        everywhere = [(size,)] * self.ranks
        return (await self._turn(name, everywhere, _broadcast))[0][0]

    async def receive_from(self, name: str, parts: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """What group ranks send to ranks of ours: for each (source, rank of ours, bytes) its flat tensor. Fails as `receive` does."""
        each = [[(source, size) for source, rank, size in parts if rank == own] for own in range(self.ranks)]
        found = [iter(flats) for flats in await self._turn(name, each, _sent)]
        return [next(found[rank]) for _, rank, _ in parts]

    async def _turn(self, name: str, work: Sequence[W], act: Callable[[Any, W, timedelta], list[Tensor]]) -> list[list[Tensor]]:
        """Let every rank of ours do its part of one call. `work[rank]` is what it is to receive."""
        group = self._groups.get(name)
        if group is None:
            raise GroupError(f"Group {name} not in {sorted(self._groups)}. Please call `init_weights_update_group` first.")
        async with group.turn:
            self.receiving += 1
            timeout = timedelta(seconds=self.timeout)
            try:
                got = await self._detached([partial(act, handle, part, timeout) for handle, part in zip(group.handles, work, strict=True)])
            except (RuntimeError, TimeoutError) as e:
                self._give_up(name, group)
                raise GroupError(f"Failed to receive weights: {e}") from None
            except asyncio.CancelledError:  # the sender hung up: the call under way is out of step for good
                self._give_up(name, group)
                raise
            finally:
                self.receiving -= 1
        for rank, flats in enumerate(got):
            self.received[rank] += sum(len(flat) for flat in flats)
        return got

    def _give_up(self, name: str, group: _Group) -> None:
        if self._groups.get(name) is group:
            del self._groups[name]

    async def _detached(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run each in a daemon thread: stopping the engine doesn't wait for a peer that is gone."""
        futures = [Future[T]() for _ in functions]
        for future, function in zip(futures, functions, strict=True):
            threading.Thread(target=_run, args=(future, function), daemon=True, name="weights").start()
        async with asyncio.timeout(self.timeout + 5.0):
            return await asyncio.gather(*map(asyncio.wrap_future, futures))


class _Group:
    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles  # one a rank of ours
        self.turn = asyncio.Lock()


def _run(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as e:
        future.set_exception(e)
        if not isinstance(e, RuntimeError):
            raise


def _rendezvous(order: InitWeightsGroup, rank: int, timeout: timedelta) -> Any:
    host, port = order.master_address, order.master_port
    return collective.join(host, port, order.group_name, rank, order.world_size, backend="gloo", timeout=timeout)


def _broadcast(handle: Any, sizes: Sequence[int], timeout: timedelta) -> list[Tensor]:
    """From rank 0, one after the other."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
    flats = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for flat in flats:
        handle.broadcast([flat], options).wait(timeout)
    return flats


def _sent(handle: Any, parts: Sequence[tuple[int, int]], timeout: timedelta) -> list[Tensor]:
    """From each (source, bytes), at once; two of one source come in their order."""
    flats = [torch.empty(size, dtype=torch.uint8) for _, size in parts]
    for work in [handle.recv([flat], source, collective.TAG) for flat, (source, _) in zip(flats, parts, strict=True)]:
        work.wait(timeout)
    return flats
