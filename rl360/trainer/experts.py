"""The experts of a layer: all of a rank's in two tensors, multiplied by groups of tokens.

megatron has this for Transformer Engine alone; without it, its experts run one by one. torch's grouped product does the same on a GPU
(bfloat16, Hopper and later); on a CPU the groups are multiplied in turn. Experts are never split over tensor-parallel ranks: these take
other experts, or other tokens.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from rl360.trainer.platform import compiled


class TorchExperts(MegatronModule):
    """weight1 [experts, gate rows then up rows, hidden], weight2 [experts, hidden, width] of this rank's experts."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, *_: object, **__: object) -> None:
        super().__init__(config=config)
        hidden, width = config.hidden_size, cast(int, config.moe_ffn_hidden_size)
        place: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.device(torch.cuda.current_device())}
        self.weight1 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * width, hidden, **place))
        self.weight2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, width, **place))
        for weight in (self.weight1, self.weight2):
            torch.nn.init.normal_(weight, std=0.02)
            tags = cast(Any, weight)
            tags.allreduce = False  # gradients are summed over the ranks that hold the same experts, not the same dense weights
            tags.tensor_model_parallel, tags.partition_dim, tags.partition_stride = True, 0, 1  # each counts in the gradient norm

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """`tokens` [t, hidden] sorted by expert, `tokens_per_expert` [experts], gate weights `probs` [t]; returns [t, hidden]."""
        counts = tokens_per_expert.to(tokens.device)
        gate_up = _grouped(tokens, self.weight1, counts)
        return _grouped(_weighted(gate_up, probs), self.weight2, counts), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """One key a tensor, its experts over the ranks of the expert-parallel group."""
        axis = len(sharded_offsets)
        experts = (axis, mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size())
        replica = (0, 0, mpu.get_expert_data_parallel_rank())

        def shard(name: str, weight: Tensor) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                prefix + name, weight, *sharded_offsets, experts, replica_id=replica, prepend_axis_num=axis
            )

        return {prefix + name: shard(name, weight) for name, weight in (("weight1", self.weight1), ("weight2", self.weight2))}


@compiled
def _weighted(gate_up: Tensor, probs: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) * up * probs.unsqueeze(-1)).to(gate_up.dtype)


def _grouped(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Each expert's tokens times its weight [out, in]."""
    if tokens.is_cuda and tokens.dtype == torch.bfloat16:
        return F.grouped_mm(tokens, weights.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    groups = tokens.split(cast(list[int], counts.tolist()))
    return torch.cat([F.linear(group, weight) for group, weight in zip(groups, weights, strict=True)])
