"""A rank's place in the parallel layout, and its part of a microbatch.

    tp  tensors split over ranks, and tokens between the tensors (sequence parallelism)
    pp  layers split over ranks
    ep  experts split over ranks, taken from the tp, cp and dp ranks
    cp  tokens of a microbatch split over ranks
    dp  samples of a step split over ranks

A microbatch's tokens are split in equal contiguous runs, over cp first, then over tp; `pack` pads them for it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from dataclasses import dataclass, fields, replace

from torch import Tensor

from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core import parallel_state as mpu

from rl360.trainer.batch import PackedBatch


@dataclass(frozen=True)
class Layout:
    """Sizes and, beside them, this rank's index."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    dp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    ep_rank: int = 0
    cp_rank: int = 0
    dp_rank: int = 0

    @staticmethod
    def here() -> Layout:
        """Of this process, as its process groups were made."""
        return Layout(
            tp=mpu.get_tensor_model_parallel_world_size(),
            pp=mpu.get_pipeline_model_parallel_world_size(),
            ep=mpu.get_expert_model_parallel_world_size(),
            cp=mpu.get_context_parallel_world_size(),
            dp=mpu.get_data_parallel_world_size(),
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            pp_rank=mpu.get_pipeline_model_parallel_rank(),
            ep_rank=mpu.get_expert_model_parallel_rank(),
            cp_rank=mpu.get_context_parallel_rank(),
            dp_rank=mpu.get_data_parallel_rank(),
        )

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def scores(self) -> bool:
        """Whether this rank's log-probs count: each token's are on one rank alone, but for tensor-parallel copies."""
        return self.last_stage and self.tp_rank == 0

    @property
    def token_multiple(self) -> int:
        """A microbatch's tokens must be a multiple of this."""
        return self.tp * self.cp

    def tokens(self, batch: PackedBatch) -> PackedBatch:
        """This rank's tokens of a microbatch; sequence bounds stay those of the whole."""
        if self.cp == 1:
            return batch
        whole = len(batch.ids)
        parts = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "cu_seqlens"}
        own = {name: part(x, self.cp_rank, self.cp) for name, x in parts.items() if isinstance(x, Tensor) and len(x) == whole}
        return replace(batch, **own)


def part(tensor: Tensor, index: int, of: int) -> Tensor:
    """Run `index` of `of` equal runs of rows."""
    rows = len(tensor) // of
    return tensor[index * rows : (index + 1) * rows]
