"""What differs between the servers that speak the contract, read off a server's own `/server_info`. Pure.

Measured: the tiny engine, SGLang 0.5.17 (H200) and 0.5.23 (CPU). The releases between them changed at the versions named here.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from rl360.engines.contract import ServerInfo

OLDEST: Final = (0, 5, 17)
_SPANS: Final = (0, 5, 19)
_SESSIONS: Final = (0, 5, 21)
_FLUSHES_WHILE_HELD: Final = (0, 5, 23)


class DialectError(Exception):
    """A server that can't be driven: the message says what it is, why not, and the remedy."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How to drive one server."""

    server: str  # as the server names itself
    sums: Literal["named", "fused_cpu", "fused_cuda"]
    """What `/weights_checker` hashes: Hugging Face's tensors by blake3, or SGLang's fused parameters by its own hashes."""
    backend: Literal["gloo", "nccl"]  # of the group over which weights are broadcast
    tp: int  # ranks that hold a share of the weights; each is a rank of the group
    ep: int
    sessions: bool
    """Updates sit between `/begin_weight_update` and `/end_weight_update` (SGLang from 0.5.21; before, the paths are 404)."""
    staged: bool
    """An update becomes visible as a whole or not at all. SGLang writes live weights: a failed update leaves them part-written."""
    flush_pause: Literal["in_place", "retract", "abort"]
    """Pause under which a flush can't fail, whatever is in flight. SGLang 0.5.17 counts held requests as busy, and a flush that
    fails in an update ends the server: there they are aborted, and their sessions send them again."""
    spans: bool  # replies name the version of every token (SGLang from 0.5.19); before, the last one of a request only
    shared_memory: bool  # can map the trainer's memory: SGLang on a GPU
    experts_from_ranks: bool  # takes experts from several trainer ranks, each GPU its own (`/update_experts_from_ranks`)


def dialect_of(info: ServerInfo) -> Dialect:
    """Raises DialectError for a server that is too old, or whose ranks can't all join one group."""
    if info.version.startswith("rl360-tiny"):
        return Dialect(
            server=info.version,
            sums="named",
            backend="gloo",
            tp=info.tp_size,
            ep=info.ep_size,
            sessions=True,
            staged=True,
            flush_pause="in_place",
            spans=True,
            shared_memory=False,
            experts_from_ranks=True,
        )
    version = _version(info)
    for key, size in (("dp_size", info.dp_size), ("pp_size", info.pp_size)):
        if size != 1:
            raise DialectError(
                f"SGLang {info.version} with {key} {size}: its ranks can't all join a weight group; start more engines instead"
            )
    return Dialect(
        server=f"SGLang {info.version}",
        sums="fused_cpu" if info.device == "cpu" else "fused_cuda",
        backend="gloo" if info.device == "cpu" else "nccl",
        tp=info.tp_size,
        ep=info.ep_size,
        sessions=version >= _SESSIONS,
        staged=False,
        flush_pause="retract" if version >= _FLUSHES_WHILE_HELD else "abort",
        spans=version >= _SPANS,
        shared_memory=info.device != "cpu",
        experts_from_ranks=False,
    )


def _version(info: ServerInfo) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", info.version)
    if found is None:
        raise DialectError(f"{info.version!r} is no version of SGLang nor the tiny engine's: {info.model_path} is served by something else")
    version = tuple(int(n) for n in found.groups())
    if version < OLDEST:
        raise DialectError(
            f"SGLang {info.version} is older than {'.'.join(map(str, OLDEST))}, the oldest that is known to work: upgrade it"
        )
    return version
