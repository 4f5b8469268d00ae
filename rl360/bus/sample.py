"""The merged sample: what `TrajectoryMerged.sample` holds and the trainer reads. Raw arrays in msgpack, never JSON (S10).

All per-token arrays have one entry a token (S8): ids int32, mask uint8 (1 = sampled by the policy, S6),
logprobs float32 and versions int32 (0.0 and -1 where the mask is 0).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

_LITTLE: Final = {"ids": "<i4", "mask": "u1", "logprobs": "<f4", "versions": "<i4"}


class SampleError(ValueError):
    """A sample whose arrays don't fit each other."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One branch of one attempt. Build it with `make`; read arrays by the properties."""

    attempt: str
    branch: int
    ids_le: bytes
    mask_le: bytes
    logprobs_le: bytes
    versions_le: bytes

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.ids_le, _LITTLE["ids"])

    @property
    def mask(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.mask_le, _LITTLE["mask"])

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return np.frombuffer(self.logprobs_le, _LITTLE["logprobs"])

    @property
    def versions(self) -> NDArray[np.int32]:
        return np.frombuffer(self.versions_le, _LITTLE["versions"])

    def __len__(self) -> int:
        return len(self.mask_le)


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Expert choices of a sample: `rows` x `layers` x `topk`, MoE layers only, dtype uint8 or uint16 (S10)."""

    rows: int
    layers: int
    topk: int
    dtype: str
    data: bytes

    @property
    def array(self) -> NDArray[np.uint8] | NDArray[np.uint16]:
        return np.frombuffer(self.data, "u1" if self.dtype == "uint8" else "<u2").reshape(self.rows, self.layers, self.topk)


def make(
    *,
    attempt: str,
    branch: int,
    ids: NDArray[np.int32],
    mask: NDArray[np.uint8],
    logprobs: NDArray[np.float32],
    versions: NDArray[np.int32],
) -> Sample:
    """Pack arrays of one length. Raises SampleError when a length or a value can't be right."""
    n = len(ids)
    if not n == len(mask) == len(logprobs) == len(versions):
        raise SampleError(
            f"{attempt}/{branch}: lengths differ: {n} ids, {len(mask)} mask, {len(logprobs)} log-probs, {len(versions)} versions"
        )
    sampled = mask != 0
    if not np.isfinite(logprobs).all():
        raise SampleError(f"{attempt}/{branch}: a log-prob is not finite")
    if (logprobs[~sampled] != 0).any() or (versions[sampled] < 0).any() or (versions[~sampled] != -1).any():
        raise SampleError(f"{attempt}/{branch}: log-probs and versions belong to sampled tokens alone")
    return Sample(
        attempt=attempt,
        branch=branch,
        ids_le=ids.astype(_LITTLE["ids"], copy=False).tobytes(),
        mask_le=mask.astype(_LITTLE["mask"], copy=False).tobytes(),
        logprobs_le=logprobs.astype(_LITTLE["logprobs"], copy=False).tobytes(),
        versions_le=versions.astype(_LITTLE["versions"], copy=False).tobytes(),
    )


_encoder = msgspec.msgpack.Encoder()
_sample = msgspec.msgpack.Decoder(Sample)
_routing = msgspec.msgpack.Decoder(Routing)


def encode(value: Sample | Routing) -> bytes:
    return _encoder.encode(value)


def encode_into(value: Sample | Routing, buffer: bytearray) -> None:
    """Encode into `buffer`, which ends up as long as the result. A buffer that is used again saves touching new memory."""
    _encoder.encode_into(value, buffer)


def decode(data: bytes) -> Sample:
    """Read a sample; raises SampleError when the bytes are not one."""
    try:
        return _sample.decode(data)
    except msgspec.MsgspecError as e:
        raise SampleError(f"not a sample: {e}") from None


def decode_routing(data: bytes) -> Routing:
    """Read a routing block; raises SampleError when the bytes are not one."""
    try:
        return _routing.decode(data)
    except msgspec.MsgspecError as e:
        raise SampleError(f"not a routing block: {e}") from None
