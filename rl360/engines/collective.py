"""Rank 0 of the group over which one plan's buckets are broadcast.

Every call blocks, so callers run it in a thread. Gloo doesn't notice a dead peer before its timeout, and a call under way
can't be aborted: whoever learns of the death first closes the group, and the blocked thread ends by the timeout with a
reference of its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

BACKEND: Final = "gloo"


class Collective:
    """Opens its rendezvous at once, on a free port of `host`; `connect` returns when all `world` ranks are there."""

    def __init__(self, host: str, name: str, world: int, *, timeout: float) -> None:
        self.name, self.world = name, world
        self._host, self._timeout = host, timedelta(seconds=timeout)
        # apart from the client that `connect` waits with: dropping the server ends all waits, ours and the engines'
        self._server: TCPStore | None = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self.port = self._server.port
        self._group: Any = None  # torch's stubs leave the collectives out

    def connect(self) -> None:
        """Join as rank 0. Raises RuntimeError when the others don't come in time, or when `close` is called."""
        store = TCPStore(self._host, self.port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        self._group = _process_group(PrefixStore(self.name, store), self.world, self._timeout)

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Send one bucket to all ranks, as one flat tensor. Raises RuntimeError on a broken group or a timeout."""
        group = self._group  # taking a group down waits for its calls: this thread is the last to let go of it
        if group is None:
            raise RuntimeError(f"group {self.name} is closed")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        group.broadcast([flatten(tensors)], options).wait(self._timeout)

    def close(self) -> None:
        """Give the group up; waits for nobody."""
        self._server = None
        self._group = None


def _process_group(store: PrefixStore, world: int, timeout: timedelta) -> Any:
    """The only place that knows the backend; an NCCL communicator takes the same store and ranks."""
    return ProcessGroupGloo(store, 0, world, timeout)


def flatten(tensors: list[Tensor]) -> Tensor:
    """One uint8 tensor on the CPU: the raw little-endian bytes of the tensors, in order ("flattened_bucket")."""
    return torch.cat([t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors])
