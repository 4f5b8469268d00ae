"""Writable folders of a place beside its workdir: a tmpfs each, bounded in bytes and in files before anything of the agent's runs.

bwrap mounts them and knows no bound for files: an empty one costs the kernel about 1 KiB that no size counts, and a place
with millions takes seconds to remove. So they are mounted again, with both bounds, from outside; inside nobody may do that.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox import kernel
from rl360.agents.sandbox.base import PATH, Limits
from rl360.agents.sandbox.disk import Disk, files_in
from rl360.agents.sandbox.host import Host
from rl360.bus.events import Boundary, Cause

_PARTS: Final = {"/tmp": 4, "/root": 8, "/dev/shm": 8, "/logs": 16}
"""Each has one part in so many of the memory limit: together they can't use it up."""

_AGAIN: Final = 'set -e; while [ $# -gt 0 ]; do mount -n -i -o "remount,nosuid,nodev,$2" tmpfs "$1"; shift 2; done'


def mounted() -> list[str]:
    """bwrap's arguments for them."""
    return [x for folder in _PARTS for x in ("--perms", "1777", "--tmpfs", folder)]


def bound(host: Host, disk: Disk, pid: int, limits: Limits, timeout: float) -> None:
    """Give those of the place whose first process is `pid` their bounds. Raises InfraError."""
    sizes = {folder: (limits.memory_mb << 20) // part for folder, part in _PARTS.items()}
    options = {folder: f"size={size},nr_inodes={files_in(size)}" for folder, size in sizes.items()}
    try:
        if host.rooted:
            with ThreadPoolExecutor(1, "folders") as once:
                once.submit(_from_a_thread, pid, options).result()
        else:
            argv = [host.nsenter, "-t", str(pid), "-m", "--", host.shell, "-c", _AGAIN, "folders"]
            argv = disk.inside([*argv, *(x for pair in options.items() for x in pair)])
            subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env={"PATH": PATH}, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        why = f"the sandbox's folders in memory can't be bounded: {e}"
        raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, why, exception=type(e).__name__) from e


def _from_a_thread(pid: int, options: dict[str, str]) -> None:
    kernel.enter_mounts(pid)
    for folder, words in options.items():
        kernel.remount_tmpfs(folder, words)
