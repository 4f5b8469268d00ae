"""What rank 0 of the trainer tells all ranks to do, as msgpack: names, digests and advantages, never a sample's tensors (CASES 26).

Small samples travel inside their events, so they are inside a `SampleRef` as well; larger ones are named by digest, and each rank
reads its own.
"""

from __future__ import annotations

import msgspec

from rl360.bus.payload import Payload


class SampleRef(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a step. `sampled` tokens of `tokens` are trained, each with `weight` (S20)."""

    attempt: str
    branch: int
    tokens: int
    sampled: int
    advantage: float
    sample: Payload
    routing: Payload | None = None
    weight: float = 1.0

    def __len__(self) -> int:
        return self.tokens


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Take the weights and optimizer state of the checkpoint at `path`; empty: the starting policy, version 0."""

    path: str = ""


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One optimizer step. `ranks[r][m]`: samples of microbatch m of rank r; `versions`: all that tokens may have."""

    version: int
    ranks: tuple[tuple[tuple[SampleRef, ...], ...], ...]
    divisor: float
    versions: tuple[int, ...]


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write model and optimizer aside, as the checkpoint of `step`."""

    step: int


class Export(msgspec.Struct, frozen=True, tag=True):
    """Give the weights of `version` by HF name, on rank 0; `apart`: experts stay with the ranks that hold them, which send them."""

    version: int
    apart: bool = False


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End."""


Command = Restore | Train | Save | Export | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    return _encoder.encode(command)


def decode(data: bytes) -> Command:
    return _decoder.decode(data)
