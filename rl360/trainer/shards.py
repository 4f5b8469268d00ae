"""What this rank holds of the whole model: taken from Hugging Face weights, and gathered again into them, a parameter at a time.

A parameter of megatron's is known here by its whole name: layers counted through all pipeline stages. A rank holds some layers (pp), of
expert weights some experts (ep), and of most tensors in them a part along one dimension (tp).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rl360.trainer import hf
from rl360.trainer.exchange import gather
from rl360.trainer.layout import Layout
from rl360.trainer.spec import ModelSpec


@dataclass(frozen=True)
class Held:
    """One local parameter: the whole one that it is a part of, the dimension split by tp (None: it isn't), the experts in it."""

    name: str
    dim: int | None
    experts: range

    @property
    def key(self) -> tuple[str, int]:
        """The same for all ranks that hold the same layers and experts."""
        return self.name, self.experts.start


class Shards:
    """The parameters of a stage's model. All ranks make it together: they tell each other what they hold."""

    def __init__(self, module: torch.nn.Module, config: Any, spec: ModelSpec, layout: Layout) -> None:
        self._spec, self._layout = spec, layout
        self._device = torch.device(torch.cuda.current_device())
        first = int(get_transformer_layer_offset(config)) if layout.pp > 1 else 0
        self._held = {name: self._describe(name, p, first) for name, p in module.named_parameters()}
        self._group: Any = mpu.get_tensor_model_parallel_group()
        self._owners = self._find_owners()

    def _describe(self, local: str, parameter: Tensor, first: int) -> Held:
        name = local
        if in_layer := local.removeprefix("decoder.layers.") if local.startswith("decoder.layers.") else "":
            index, _, rest = in_layer.partition(".")
            name = f"decoder.layers.{int(index) + first}.{rest}"
        if name == hf.OUTPUT and self._spec.tied:
            name = hf.EMBEDDING  # the last stage's copy of it
        if not hf.of_experts(name):
            attributes = cast(Any, parameter)
            split = self._layout.tp > 1 and getattr(parameter, "tensor_model_parallel", False)
            return Held(name, attributes.partition_dim if split else None, range(0))
        experts = len(parameter)
        return Held(name, None, range(self._layout.ep_rank * experts, (self._layout.ep_rank + 1) * experts))

    def _find_owners(self) -> dict[tuple[str, int], int]:
        """For each part of the model the lowest rank that holds it."""
        mine = [held.key for held in self._held.values()]
        owners: dict[tuple[str, int], int] = {}
        for rank, keys in enumerate(gather(mine, list[tuple[str, int]])):
            for key in keys:
                owners.setdefault(key, rank)
        return owners

    # ------------------------------------------------------------------------------------------------ in

    def take(self, weights: Mapping[str, Tensor], where: str) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of HF weights, by local name, one at a time. Raises ModelError when they aren't this model's."""
        hf.check_names(weights, self._spec, where)
        for local, held in self._held.items():
            yield local, self._own(held, hf.whole(held.name, weights, self._spec, where, held.experts))

    def _own(self, held: Held, whole: Tensor) -> Tensor:
        if held.dim is None:
            return whole
        index, of = self._layout.tp_rank, self._layout.tp
        if _gated(held.name):
            return torch.cat([half.chunk(of)[index] for half in whole.chunk(2)])
        return whole.chunk(of, held.dim)[index]

    # ------------------------------------------------------------------------------------------------ out

    def export(self, weights: Mapping[str, Tensor], *, apart: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Stream (HF name, copy of the tensor) on rank 0, a parameter at a time; other ranks run through it and get nothing.

        `weights` by local name, of all ranks alike: the live ones or those of another version. `apart`: experts aren't gathered, each
        comes on the lowest rank that holds it.
        """
        mine = {held.key: (local, held) for local, held in self._held.items()}
        for name in hf.names(self._spec):
            for key in sorted(key for key in self._owners if key[0] == name):
                held = mine.get(key)
                whole = self._kept(key, weights, held) if apart and hf.of_experts(name) else self._gather(key, weights, held)
                if whole is not None:
                    experts = range(key[1], key[1] + len(whole)) if hf.of_experts(name) else range(0)
                    for hf_name, part in zip(hf.hf_names(name, experts), hf.split(name, whole, self._spec), strict=True):
                        yield hf_name, part.clone(memory_format=torch.contiguous_format)

    def _kept(self, key: tuple[str, int], weights: Mapping[str, Tensor], mine: tuple[str, Held] | None) -> Tensor | None:
        """Experts, on the rank that owns them."""
        return weights[mine[0]].detach() if mine is not None and self._owners[key] == dist.get_rank() else None

    def _gather(self, key: tuple[str, int], weights: Mapping[str, Tensor], mine: tuple[str, Held] | None) -> Tensor | None:
        """The whole parameter, on rank 0."""
        owner, rank = self._owners[key], dist.get_rank()
        whole: Tensor | None = None
        if mine is not None and owner in dist.get_process_group_ranks(self._group):
            local, held = mine
            whole = self._joined(held, weights[local].detach())
        if owner == 0:
            return whole if rank == 0 else None
        if rank == owner:
            assert whole is not None  # an owner is in its own group
            dist.send(whole.to(self._device).contiguous(), 0)
        return self._receive(key, owner, weights) if rank == 0 else None

    def _joined(self, held: Held, own: Tensor) -> Tensor:
        """All tensor-parallel parts of a parameter, joined."""
        if held.dim is None:
            return own
        own = own.to(self._device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self._layout.tp)]
        dist.all_gather(parts, own, group=self._group)
        return _join(held.name, parts, held.dim)

    def _receive(self, key: tuple[str, int], owner: int, weights: Mapping[str, Tensor]) -> Tensor:
        shape = hf.shape(key[0], self._spec)
        if hf.of_experts(key[0]):
            shape = (shape[0] // self._layout.ep, *shape[1:])
        whole = torch.empty(shape, dtype=next(iter(weights.values())).dtype, device=self._device)
        dist.recv(whole, owner)
        return whole


def _gated(name: str) -> bool:
    """Each tensor-parallel part of it holds some rows of gate and the same of up."""
    return name.endswith("linear_fc1.weight")


def _join(name: str, parts: Sequence[Tensor], dim: int) -> Tensor:
    if _gated(name):
        halves = [p.chunk(2) for p in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    return torch.cat(list(parts), dim)
