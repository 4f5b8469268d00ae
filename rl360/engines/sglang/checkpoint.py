"""The policy's folder as Hugging Face names it, each tensor read when it is asked for."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import safe_open
from torch import Tensor

from rl360.bus.events import Boundary, Cause
from rl360.engines.client import EngineError

SMALL: Final = 64 * 1024 * 1024
"""Bytes of a policy that is compared with a server's checksums wholly when it starts. Of a larger one, what no rank cuts is enough:
it shows that the hash is the one that is known, and every push proves the rest."""


_NO_MOE: Final = {
    "tie_word_embeddings": "has an output matrix of its own: store the embedding once more as lm_head.weight and set it to false",
    "mlp_only_layers": "has experts in every layer: it must be empty",
}
"""What Qwen3-MoE's config.json can say and SGLang (0.5.17, 0.5.23) doesn't hear."""


def refuse_unservable(folder: Path, generation: str) -> None:
    """Raise EngineError (REFUSED) for a policy that SGLang would serve in part from memory that nobody has written."""
    settings = json.loads((folder / "config.json").read_text())
    if settings.get("model_type") != "qwen3_moe":
        return
    for key, remedy in _NO_MOE.items():
        if settings.get(key):
            detail = f"{folder / 'config.json'}: {key} = {settings[key]}: SGLang's Qwen3-MoE {remedy}"
            raise EngineError(Boundary.ENGINE, Cause.REFUSED, detail, generation=generation)


class Checkpoint(Mapping[str, Tensor]):
    """Weights in `dtype`. A tied output matrix, which some writers store too, is left out."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._read: dict[str, Callable[[str], Tensor]] = {}
        self._shapes: dict[str, list[int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            shard = cast(Any, safe_open(path, framework="pt"))
            names: list[str] = shard.keys()
            for name in names:
                self._read[name] = shard.get_tensor
                self._shapes[name] = shard.get_slice(name).get_shape()
        if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
            self._read.pop("lm_head.weight", None)

    def __getitem__(self, name: str) -> Tensor:
        return self._read[name](name).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)

    def shapes(self) -> dict[str, Tensor]:
        """The same weights without their numbers."""
        return {name: torch.empty(self._shapes[name], dtype=self._dtype, device="meta") for name in self}

    def checked(self) -> dict[str, Tensor]:
        """What is compared with a server's checksums when it starts."""
        small = sum(t.numel() * t.element_size() for t in self.shapes().values()) <= SMALL
        return {name: self[name] for name in self if small or name.endswith(("norm.weight", "mlp.gate.weight"))}
