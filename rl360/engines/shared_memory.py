"""Buckets that engines on the trainer's own host map instead of receiving: CUDA IPC, for engines that sample on the trainer's GPUs.

SGLang demands a pickle for it (`UpdateFromTensor`). It holds names and handles, never weights: what torch.multiprocessing makes of
a tensor on a GPU. The GPU is named by its UUID, as SGLang does it, since the two sides may number their GPUs differently.
Not covered: CPU engines. torch shares CPU memory between strangers through a daemon of its own that outlives both.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rl360.engines.client import EngineClient
from rl360.engines.contract import UpdateFromTensor
from rl360.engines.dialect import Dialect
from rl360.engines.plan import Bucket
from rl360.engines.together import Broken, Clients, on_all

_DEVICE: Final = 6  # of the arguments from which a CUDA tensor is rebuilt


class SharedMemory:
    """Sends a plan's buckets to engines on this host. Nothing is kept from one bucket to the next."""

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        self._dialects = dialects

    async def send(self, bucket: Bucket, weights: Mapping[str, Tensor], clients: Clients, *, flush_cache: bool) -> None:
        """Let all engines load one bucket. Raises Broken."""
        shared = on_gpu({s.name: weights[s.name] for s in bucket.shards})

        async def load(client: EngineClient) -> None:
            ranks = range(self._dialects[client.generation].tp)
            await client.map_tensors(UpdateFromTensor(serialized_named_tensors=[handles(shared) for _ in ranks], flush_cache=flush_cache))

        _, faults = await on_all(clients, load)
        if faults:
            raise Broken(faults)

    async def send_experts(self, version: int, clients: Clients) -> None:
        """They are in the buckets."""


def on_gpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies for engines to map, so that what is mapped is a bucket and not the trainer's own memory. Raises RuntimeError without a GPU."""
    copies = {name: torch.empty(t.shape, dtype=t.dtype, device="cuda").copy_(t.detach()) for name, t in weights.items()}
    torch.cuda.synchronize()
    return copies


def handles(shared: Mapping[str, Tensor]) -> str:
    """The payload for one rank. Each is good for one reader."""
    out = io.BytesIO()
    _Pickler(out).dump(list(shared.items()))
    return base64.b64encode(out.getvalue()).decode()


class _Pickler(ForkingPickler):
    """torch.multiprocessing's own reductions, but for the name of the GPU."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, args = reductions.reduce_tensor(obj)
        gpu = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*args[:_DEVICE], gpu, *args[_DEVICE + 1 :])
