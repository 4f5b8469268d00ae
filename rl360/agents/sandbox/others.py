"""Killing what an agent left running while its sandbox stays: done from outside, where nothing inside can stop it or ward it off."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_SECONDS: Final = 5.0


def kill_others(first: int) -> None:
    """SIGKILL every process in the pid namespace of process `first` but that one, again and again, until none is left or for 5 s."""
    deadline = time.monotonic() + _SECONDS
    while (left := _others(first)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _others(first: int) -> list[int]:
    space = _namespace(str(first))
    names = (entry.name for entry in Path("/proc").iterdir())
    return [int(n) for n in names if n.isdigit() and int(n) != first and space and _namespace(n) == space and not _zombie(n)]


def _namespace(pid: str) -> int:
    """Inode of a process's pid namespace; 0 for one that is gone, or another user's."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def _zombie(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True
