"""What only a runner on the daemon's own machine can see of a container: its network from within, and its cgroup."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox import kernel
from rl360.agents.sandbox.base import LABEL
from rl360.agents.sandbox.cgroups import ROOT, Cgroup
from rl360.agents.sandbox.others import kill_others
from rl360.bus.events import Boundary, Cause

_REMEDY: Final = (
    "run the runner as root on the daemon's machine (in a container: pid: host), "
    'or use harness = "mini_swe" and tasks without an allowlist'
)
_LABEL_SECONDS: Final = 5.0
"""A container that started a moment ago has its first process's environment by then."""


def listen_in(pid: int, label: str, port: int = 0) -> socket.socket:
    """A listening socket on a port (0: a free one) of the loopback of the container whose first process is `pid`. Raises InfraError.

    A socket keeps the network that it was made in, whoever holds it: a thread goes in, makes it, and ends.
    """
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def enter() -> None:
        try:
            _see(pid, label)
            with open(f"/proc/{pid}/ns/net", "rb") as network:
                kernel.enter_network(network.fileno())
            made.append(socket.create_server(("127.0.0.1", port), backlog=64))
        except OSError as e:
            failed.append(e)

    thread = threading.Thread(target=enter, name="listen")
    thread.start()
    thread.join()
    if failed:
        why = f"no listener in the sandbox's network: {failed[0]}; {_REMEDY}"
        raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, why, exception=type(failed[0]).__name__)
    return made[0]


def _see(pid: int, label: str) -> None:
    """Wait until the process shows the label. Raises OSError when it does not."""
    end = time.monotonic() + _LABEL_SECONDS
    while not _is(pid, label):
        if time.monotonic() > end:
            raise ProcessLookupError(f"process {pid} here is not the sandbox's")
        time.sleep(0.005)


def kill_in(pid: int, label: str) -> bool:
    """Kill all but the first process, `pid`, of a container. False, and nothing done, when it isn't this machine's, or is gone."""
    ours = _is(pid, label)
    if ours:
        kill_others(pid)
    return ours


def end_in(pid: int, label: str) -> None:
    """Kill the first process of a container, and with it all others; nothing when it isn't this machine's, or is gone."""
    if _is(pid, label):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is(pid: int, label: str) -> bool:
    try:
        return f"{LABEL}={label}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def oom_kills(pid: int) -> int:
    """Processes that the memory limit of the container with this first process killed; 0 where its cgroup can't be read."""
    return max((group.oom_kills() for group in _cgroups(pid)), default=0) if pid > 0 else 0


def _cgroups(pid: int) -> list[Cgroup]:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Cgroup] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            found.append(Cgroup((ROOT / "memory" / path.lstrip("/"),), 1))
        elif not controllers:
            found.append(Cgroup((ROOT / path.lstrip("/"),), 2))
    return [g for g in found if (g.folders[0] / ("memory.oom_control" if g.version == 1 else "memory.events")).exists()]
