"""A container that runs one command and ends with it: its output, bounded, until it ends or its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from rl360.agents.sandbox.base import OUTPUT_LIMIT, ExecResult
from rl360.agents.sandbox.docker.engine import CALL_SECONDS, Engine
from rl360.agents.sandbox.docker.stream import Kept, follow, hijack
from rl360.agents.sandbox.process import FLOOD_LIMIT, text


def until_end(engine: Engine, container: str, timeout: float, begin: Callable[[], None] | None = None) -> ExecResult:
    """Start it and wait. With `begin` the command reads a line first, which it gets once that was called.

    It is killed at the timeout or on a flood, and has ended when this returns. Raises what the SDK raises."""
    deadline = time.monotonic() + timeout
    streams = f"stream=1&stdout=1&stderr=1{'&stdin=1' if begin else ''}"
    link, rest = hijack(engine.address, f"/containers/{container}/attach?{streams}", None, CALL_SECONDS)
    kept = Kept(OUTPUT_LIMIT)
    with link:
        engine.api.start(container)
        if begin is not None:
            begin()
            link.sendall(b"\n")
        ended = follow(link, rest, deadline, kept.add, lambda: kept.total > FLOOD_LIMIT)
    if not ended:
        with suppress(engine.errors.APIError):  # it ended a moment ago
            engine.api.kill(container)
    status = int(engine.api.wait(container, timeout=CALL_SECONDS, condition="not-running")["StatusCode"])
    return ExecResult(status, text(kept.data), kept.total > OUTPUT_LIMIT, timed_out=not ended and kept.total <= FLOOD_LIMIT)
