"""Checksums of weights, computed alike by the engine that holds them and the trainer that sent them.

Over Hugging Face names, dtype and shape included, so that a transposed or cast tensor never agrees by accident (CASES 31).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import blake3
import torch
from torch import Tensor


def checksum_of(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """blake3 hex digest of every tensor as it is held: dtype, shape, then row-major bytes."""
    return {name: _digest(tensor) for name, tensor in named_tensors}


def combined(checksums: Mapping[str, str]) -> str:
    """One digest of a whole model, whatever the order of its tensors.

    >>> combined({"a": "01", "b": "02"}) == combined({"b": "02", "a": "01"})
    True
    """
    hasher = blake3.blake3()
    for name in sorted(checksums):
        hasher.update(f"{name}={checksums[name]}\n".encode())
    return hasher.hexdigest()


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous()
    hasher = blake3.blake3(f"{dtype_name(tensor.dtype)}{list(flat.shape)}\n".encode())
    hasher.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """The name that the contract uses.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
