"""The shipped policy with attention heads of 64 numbers, which is the least that SGLang's kernels on a GPU take; it says the same.

    python bench/wide_policy.py OUT [--experts 8] [--topk 2] [--noise 0.8]

With `--experts`, a mixture of experts is made of it (rl360/tiny/upcycle.py): `--noise` tells how far apart they are.
A number of a wide head stands where the rotation has the frequency that the narrow head gave it; the others are zero.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rl360.config import Policy
from rl360.tiny.upcycle import WEIGHTS, Recipe, upcycle


def widen(source: Path, out: Path) -> None:
    """Write the dense policy in `source` with heads twice as wide into `out`."""
    settings = json.loads((source / "config.json").read_text())
    narrow = int(settings["head_dim"])
    shutil.copytree(source, out)
    tensors = {name: _wide(name.split(".")[-2], tensor, narrow).contiguous() for name, tensor in load_file(source / WEIGHTS).items()}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(settings | {"head_dim": 2 * narrow}, indent=2) + "\n")


def _wide(part: str, tensor: torch.Tensor, narrow: int) -> torch.Tensor:
    """`tensor`: of queries and keys [heads * narrow, hidden], values the same, outputs [hidden, heads * narrow], norms [narrow]."""
    half = torch.arange(narrow // 2) * 2
    rotated = torch.cat([half, half + narrow])  # dimension j of n turns with base^(-2j/n): 2j of 2n does the same
    match part:
        case "q_proj" | "k_proj":
            return _spread(tensor.unflatten(0, (-1, narrow)), 1, rotated, 2 * narrow).flatten(0, 1)
        case "v_proj":
            return _spread(tensor.unflatten(0, (-1, narrow)), 1, torch.arange(narrow), 2 * narrow).flatten(0, 1)
        case "o_proj":
            return _spread(tensor.unflatten(1, (-1, narrow)), 2, torch.arange(narrow), 2 * narrow).flatten(1, 2)
        case "q_norm":  # over as many zeros a norm is smaller by sqrt(2): what it gives to queries the score's scale, 1/sqrt(size), takes
            return _spread(tensor, 0, rotated, 2 * narrow)
        case "k_norm":  # and what it gives to keys is taken here
            return _spread(tensor, 0, rotated, 2 * narrow) / math.sqrt(2)
        case _:
            return tensor


def _spread(tensor: torch.Tensor, dim: int, places: torch.Tensor, size: int) -> torch.Tensor:
    """`tensor` along `dim` at `places` of `size`, zeros between."""
    shape = [*tensor.shape]
    shape[dim] = size
    return torch.zeros(shape, dtype=tensor.dtype).index_copy_(dim, places, tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.8)
    args = parser.parse_args()
    if not args.experts:
        widen(Policy().folder, args.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        widen(Policy().folder, Path(folder) / "wide")
        upcycle(Path(folder) / "wide", args.out, Recipe(experts=args.experts, topk=args.topk, noise=args.noise), seed=0)


if __name__ == "__main__":
    main()
