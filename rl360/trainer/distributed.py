"""Data-parallel ranks of the trainer."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rl360.trainer.platform import platform

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

_COLLECTIVE = timedelta(minutes=10)
"""A collective that takes longer has lost a rank."""


@contextmanager
def process_groups(rank: int = 0, world: int = 1, meeting: Path | None = None) -> Generator[None]:
    """Join the trainer's process groups, inside the platform. `meeting`: a file that all ranks can write, for world > 1."""
    if (world > 1) != (meeting is not None):
        raise ValueError("several ranks need a file to meet at; one rank needs none")
    store = dist.HashStore() if meeting is None else dist.FileStore(str(meeting), world)  # pyright: ignore[reportPrivateImportUsage]
    with platform() as here:
        dist.init_process_group(here.backend, store=store, rank=rank, world_size=world, timeout=_COLLECTIVE)
        try:
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
            model_parallel_cuda_manual_seed(0, force_reset_rng=True)  # no part of a step is random; megatron wants a seed
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
