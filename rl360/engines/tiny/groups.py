"""The collective groups over which an engine receives weights: gloo, no default process group, several over its life.

A collective call blocks and can't be aborted, so each runs in a thread of its own that ends by the group's timeout at the
latest. Giving a group up forgets it; a call under way keeps it alive until then, and nobody waits for that.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, TCPStore

from rl360.engines import collective
from rl360.engines.contract import InitWeightsGroup

T = TypeVar("T")


class GroupError(Exception):
    """A group can't be joined, isn't known, or failed."""


class Groups:
    """Groups by name. A call is answered within the timeout and a few seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout  # seconds
        self.receiving = 0  # calls that wait for a broadcast now
        self._groups: dict[str, _Group] = {}

    async def join(self, order: InitWeightsGroup) -> None:
        """Join as rank `rank_offset`; returns when all ranks are there. One left over under the same name is given up."""
        if order.backend != "gloo":
            raise GroupError(f"backend {order.backend!r} is not served here: the tiny engine speaks gloo")
        if not 0 < order.rank_offset < order.world_size:
            raise GroupError(f"rank_offset {order.rank_offset} must lie in [1, {order.world_size}): rank 0 is the sender")
        self._groups.pop(order.group_name, None)
        try:
            handle = await self._detached(lambda: _rendezvous(order, timedelta(seconds=self.timeout)))
        except (RuntimeError, TimeoutError) as e:
            raise GroupError(f"Failed to initialize custom process group: {e}") from None
        self._groups[order.group_name] = _Group(handle)

    def leave(self, name: str) -> None:
        if self._groups.pop(name, None) is None:
            raise GroupError("The group to be destroyed does not exist.")

    async def receive(self, name: str, size: int) -> Tensor:
        """One broadcast of `size` bytes from rank 0, in the order of the calls. A group that fails is given up."""
        group = self._groups.get(name)
        if group is None:
            raise GroupError(f"Group {name} not in {sorted(self._groups)}. Please call `init_weights_update_group` first.")
        async with group.turn:
            self.receiving += 1
            try:
                return await self._detached(lambda: _receive(group.handle, size, timedelta(seconds=self.timeout)))
            except (RuntimeError, TimeoutError) as e:
                self._give_up(name, group)
                raise GroupError(f"Failed to receive weights: {e}") from None
            except asyncio.CancelledError:  # the sender hung up: the broadcast under way is out of step for good
                self._give_up(name, group)
                raise
            finally:
                self.receiving -= 1

    def _give_up(self, name: str, group: _Group) -> None:
        if self._groups.get(name) is group:
            del self._groups[name]

    async def _detached(self, function: Callable[[], T]) -> T:
        """Run in a daemon thread: stopping the engine doesn't wait for a peer that is gone."""
        future: Future[T] = Future()
        threading.Thread(target=_run, args=(future, function), daemon=True, name="weights").start()
        return await asyncio.wait_for(asyncio.wrap_future(future), self.timeout + 5.0)


class _Group:
    def __init__(self, handle: Any) -> None:
        self.handle = handle
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


def _rendezvous(order: InitWeightsGroup, timeout: timedelta) -> Any:
    store = TCPStore(order.master_address, order.master_port, is_master=False, wait_for_workers=False, timeout=timeout)
    return collective.join(store, order.group_name, order.rank_offset, order.world_size, backend="gloo", timeout=timeout)


def _receive(handle: Any, size: int, timeout: timedelta) -> Tensor:
    flat = torch.empty(size, dtype=torch.uint8)
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
    handle.broadcast([flat], options).wait(timeout)
    return flat
