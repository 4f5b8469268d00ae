"""The trainer's side of the groups of a plan: rank 0 of the one over which buckets are broadcast, and what all groups share.

The rendezvous is torch's own (`init_process_group` with a group name), so that a server which joins by it finds the same keys.
Every call blocks, so callers run it in a thread. Gloo doesn't notice a dead peer before its timeout, and a call under way
can't be aborted: whoever learns of the death first closes the group, and the blocked thread ends by the timeout with a
reference of its own.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false
from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

Backend = Literal["gloo", "nccl"]

TAG: Final = 0
"""Of what goes from rank to rank: two messages between the same two arrive in their order."""
_PATIENCE: Final = 10
"""NCCL's own watchdog ends the whole process at its timeout: ours comes first, by this factor."""
_POLL: Final = 0.0005


class Collective:
    """Opens its rendezvous at once, on a free port of `host`; `connect` returns when all `world` ranks are there."""

    def __init__(self, host: str, name: str, world: int, *, backend: Backend, timeout: float) -> None:
        self.name, self.world = name, world
        self.backend: Backend = backend
        self._host, self._timeout = host, timedelta(seconds=timeout)
        # apart from the client that `connect` waits with: dropping the server ends all waits, ours and the engines'
        self._server: Any = rendezvous(host, self._timeout)
        self.port: int = self._server.port
        self._group: Any = None  # torch's stubs leave the collectives out

    def connect(self) -> None:
        """Join as rank 0. Raises RuntimeError when the others don't come in time, or when `close` is called.

        NCCL meets at the first broadcast, not here.
        """
        self._group = join(self._host, self.port, self.name, 0, self.world, backend=self.backend, timeout=self._timeout)

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Send one bucket to all ranks, as one flat tensor. Raises RuntimeError on a broken group or a timeout."""
        group = self._group  # taking a group down waits for its calls: this thread is the last to let go of it
        if group is None:
            raise RuntimeError(f"group {self.name} is closed")
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        flat = flatten(tensors, self.backend)
        finish(group, [group.broadcast([flat], options)], backend=self.backend, timeout=self._timeout, name=self.name)

    def close(self) -> None:
        """Give the group up; waits for nobody."""
        self._server = None
        self._group = None


def rendezvous(host: str, timeout: timedelta) -> Any:
    """Where the ranks of a group find each other: a store on a free port of `host`."""
    return c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def join(host: str, port: int, name: str, rank: int, world: int, *, backend: Backend, timeout: timedelta) -> Any:
    """One rank of a group, with the key prefixes that `torch.distributed` gives a named group. Raises RuntimeError."""
    store = c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    device = "cpu" if backend == "gloo" else "cuda"
    keys = c10d.PrefixStore(f"{device}/", c10d.PrefixStore(f"{name}/", c10d.PrefixStore(name, store)))
    if backend == "gloo":
        return c10d.ProcessGroupGloo(keys, rank, world, timeout)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout * _PATIENCE
    return c10d.ProcessGroupNCCL(keys, rank, world, options)


def finish(group: Any, works: Sequence[Any], *, backend: Backend, timeout: timedelta, name: str) -> None:
    """Wait for calls under way. NCCL has no wait with a timeout on the host: its communicator is aborted when it is late.

    Raises RuntimeError.
    """
    if backend == "gloo":
        for work in works:
            work.wait(timeout)
        return
    end = time.monotonic() + timeout.total_seconds()
    while not all(work.is_completed() for work in works):
        if time.monotonic() > end:
            group.abort()
            raise RuntimeError(f"group {name} did not carry its weights within {timeout.total_seconds():g} s")
        time.sleep(_POLL)
    torch.cuda.synchronize()


def flatten(tensors: list[Tensor], backend: Backend = "gloo") -> Tensor:
    """One uint8 tensor where the backend sends from: the raw little-endian bytes of the tensors, in order ("flattened_bucket")."""
    device = torch.device("cpu") if backend == "gloo" else next((t.device for t in tensors if t.is_cuda), torch.device("cuda"))
    return torch.cat([t.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for t in tensors])
