"""A container that runs one command and ends with it: its output, bounded, until it ends or its time is over."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from rl360.agents.sandbox.base import OUTPUT_LIMIT, ExecResult
from rl360.agents.sandbox.docker.engine import CALL_SECONDS, Engine
from rl360.agents.sandbox.docker.stream import Frames, hijack
from rl360.agents.sandbox.process import FLOOD_LIMIT, text

_CHUNK: Final = 256 << 10


def until_end(engine: Engine, container: str, timeout: float) -> ExecResult:
    """Start it and wait. It is killed at the timeout or on a flood, and has ended when this returns. Raises what the SDK raises."""
    deadline = time.monotonic() + timeout
    link, rest = hijack(engine.address, f"/containers/{container}/attach?stream=1&stdout=1&stderr=1", None, CALL_SECONDS)
    kept, total, ended = bytearray(), 0, False
    with link:
        engine.api.start(container)
        frames = Frames()
        while not ended and total <= FLOOD_LIMIT:
            for _, piece in frames.feed(rest):
                total += len(piece)
                kept += piece[: max(0, OUTPUT_LIMIT - len(kept))]
            if (left := deadline - time.monotonic()) <= 0:
                break
            link.settimeout(left)
            rest = b""
            with suppress(TimeoutError):
                rest = link.recv(_CHUNK)
                ended = not rest
    if not ended:
        with suppress(engine.errors.APIError):  # it ended a moment ago
            engine.api.kill(container)
    status = int(engine.api.wait(container, timeout=CALL_SECONDS, condition="not-running")["StatusCode"])
    return ExecResult(status, text(bytes(kept)), total > OUTPUT_LIMIT, timed_out=not ended and total <= FLOOD_LIMIT)
