"""Waiting for a child with a deadline while its output is read and bounded. Blocks; made for worker threads."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rl360.agents.sandbox.base import OUTPUT_LIMIT

FLOOD_LIMIT: Final = 64 << 20
"""Bytes of output after which a command is killed: reading an endless flood would cost the runner its CPU."""

_CHUNK: Final = 64 << 10


@dataclass(frozen=True)
class Captured:
    """Output (its first bytes), and why reading ended."""

    output: bytes
    truncated: bool
    timed_out: bool
    flooded: bool


def capture(child: subprocess.Popen[bytes], timeout: float, kill: Callable[[], None], keep: int = OUTPUT_LIMIT) -> Captured:
    """Read `child.stdout` until the child exits, then what is left in the pipe. Calls `kill` at the timeout or on a flood.

    A background process that keeps the pipe open doesn't hold this up: the child's own exit ends it.
    The child is waited for before this returns.
    """
    assert child.stdout is not None
    out = child.stdout.fileno()
    os.set_blocking(out, False)
    reader = _Bounded(out, keep)
    deadline = time.monotonic() + timeout
    exited = os.pidfd_open(child.pid)
    try:
        timed_out = flooded = False
        poll = select.poll()
        poll.register(out, select.POLLIN)
        poll.register(exited, select.POLLIN)
        while not (timed_out or flooded):
            events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if out in events and not reader.read():
                poll.unregister(out)
            if exited in events:
                break
            flooded = reader.total > FLOOD_LIMIT
            timed_out = time.monotonic() >= deadline
        if timed_out or flooded:
            kill()
        child.wait()
        reader.drain()
        return Captured(bytes(reader.kept), reader.total > keep, timed_out, flooded)
    finally:
        os.close(exited)
        child.stdout.close()


def text(data: bytes) -> str:
    """Output as text; a character that was cut at the end is left out, other bad bytes are replaced."""
    return data.decode("utf-8", errors="replace")


def status_of(returncode: int) -> int:
    """Exit status as a shell reports it: 128 + signal for a killed process."""
    return returncode if returncode >= 0 else 128 - returncode


class _Bounded:
    """Keeps the first bytes of a non-blocking pipe and counts all of them."""

    def __init__(self, fd: int, keep: int) -> None:
        self._fd, self._keep = fd, keep
        self.kept = bytearray()
        self.total = 0

    def read(self) -> bool:
        """Read once; False at the end of the pipe."""
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return True
        self.total += len(data)
        self.kept += data[: max(0, self._keep - len(self.kept))]
        return bool(data)

    def drain(self) -> None:
        """Read what is in the pipe now, within the flood limit."""
        end = self.total + (1 << 20)  # the largest pipe
        while self.total < end:
            before = self.total
            if not self.read() or self.total == before:
                return
