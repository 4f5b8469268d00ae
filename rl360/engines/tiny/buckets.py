"""Buckets of weights: what may be in one, and how its flat bytes become tensors. Pure but for the copy at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from rl360.engines.checksum import dtype_name
from rl360.engines.contract import ExpertPart, UpdateExperts, UpdateFromDistributed
from rl360.engines.plan import expert_of, serving
from rl360.engines.tiny.weights import Weights

SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an element of the dtypes that a bucket may name."""

_VERSION = re.compile(r"0|[1-9][0-9]{0,17}")


Tensors = UpdateFromDistributed | ExpertPart
"""What names the tensors of one flat one."""


def declared_bytes(bucket: Tensors) -> int | None:
    """Size of the flat tensor that the bucket's own words make it, or None when they make no sense."""
    if not len(bucket.names) == len(bucket.dtypes) == len(bucket.shapes) or not bucket.names:
        return None
    if any(d not in SIZES for d in bucket.dtypes) or any(side < 0 for shape in bucket.shapes for side in shape):
        return None
    return sum(SIZES[d] * math.prod(s) for d, s in zip(bucket.dtypes, bucket.shapes, strict=True))


def refusal(bucket: UpdateFromDistributed, weights: Weights) -> str:
    """Why this bucket can't be loaded; empty: it can. Nothing has been written when this is asked."""
    if bucket.load_format != "flattened_bucket":
        return f"load_format {bucket.load_format!r} is not served here: send flattened_bucket"
    if bucket.abort_all_requests:
        return "abort_all_requests: an update never aborts requests; use /abort_request"
    if bucket.weight_version is not None and (why := version_refusal(bucket.weight_version)):
        return why
    return _tensors_refusal(bucket, weights)


def experts_refusal(order: UpdateExperts, weights: Weights, ranks: int) -> str:
    """Why these experts can't be loaded by an engine of so many ranks; empty: they can."""
    named = [name for part in order.parts for name in part.names]
    if len(set(named)) < len(named):
        return f"{next(n for n in named if named.count(n) > 1)} is named twice"
    return next((why for part in order.parts if (why := _part_refusal(part, weights, ranks))), "")


def _part_refusal(part: ExpertPart, weights: Weights, ranks: int) -> str:
    if not 0 <= part.gpu < ranks:
        return f"gpu {part.gpu}: this engine has {ranks}"
    if why := _tensors_refusal(part, weights):
        return why
    for name in part.names:
        expert = expert_of(name)
        if expert is None:
            return f"{name} is no expert's"
        if serving(expert, weights.shape.experts, ranks) != part.gpu:
            return f"{name} was sent to gpu {part.gpu}: gpu {serving(expert, weights.shape.experts, ranks)} serves it"
    return ""


def _tensors_refusal(bucket: Tensors, weights: Weights) -> str:
    if not len(bucket.names) == len(bucket.dtypes) == len(bucket.shapes) or not bucket.names:
        return f"{len(bucket.names)} names, {len(bucket.dtypes)} dtypes, {len(bucket.shapes)} shapes: they must be as many, and some"
    if len(set(bucket.names)) < len(bucket.names):
        return f"{next(n for n in bucket.names if bucket.names.count(n) > 1)} is named twice"
    tensors = zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True)
    return next((why for name, dtype, shape in tensors if (why := _tensor_refusal(name, dtype, shape, weights))), "")


def version_refusal(version: str) -> str:
    """Why `version` is no policy version; empty: it is one.

    >>> version_refusal("12"), version_refusal("v12")
    ('', "weight_version 'v12' is not a policy version: send str(int)")
    """
    return "" if _VERSION.fullmatch(version) else f"weight_version {version!r} is not a policy version: send str(int)"


def tensors_of(bucket: Tensors, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Named views into the flat bytes of a bucket that wasn't refused."""
    offset = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        size = SIZES[dtype] * math.prod(shape)
        yield name, flat[offset : offset + size].view(getattr(torch, dtype)).view(shape)
        offset += size


def _tensor_refusal(name: str, dtype: str, shape: list[int], weights: Weights) -> str:
    held = weights.named.get(name)
    if held is None:
        if name == "lm_head.weight" and weights.shape.tied:
            return "lm_head.weight: the embeddings are tied; send model.embed_tokens.weight alone"
        return f"{name} is not a weight of this model"
    if dtype != dtype_name(held.dtype):
        return f"{name}: {dtype} was sent, {dtype_name(held.dtype)} is held; cast before sending"
    if shape != list(held.shape):
        return f"{name}: shape {shape} was sent, {list(held.shape)} is held"
    return ""
