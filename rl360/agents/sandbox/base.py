"""What a sandbox promises, whatever it is made of."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OUTPUT_LIMIT: Final = 64 << 10
"""Bytes of a command's output that are kept."""
LABEL: Final = "RL360_SANDBOX"
"""Environment variable that names the sandbox of a process; a sweep goes by it."""


@dataclass(frozen=True)
class ExecResult:
    """What a command did. `status` is the exit status, 128 + signal when it was killed. Output is stdout and stderr mixed."""

    status: int
    output: str
    truncated: bool = False  # output beyond the limit was dropped
    timed_out: bool = False  # it was killed when its seconds were over


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one sandbox: memory in MiB (what is written outside the workdir included), MiB written in the workdir, processes, CPUs.

    The workdir is in memory too and comes on top of `memory_mb`: a full one leaves the verifier as much as an empty one.
    """

    memory_mb: int
    storage_mb: int
    pids: int
    cpus: float


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """One run in a fresh place after `kill_all`: `argv` sees the workdir, `read_only` and `writable` {path inside: folder}."""

    argv: tuple[str, ...]
    read_only: Mapping[str, Path]
    writable: Mapping[str, Path]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


class Sandbox(Protocol):
    """A sandbox's life: `start`, any number of `exec`, `kill_all`, any number of `run_sealed`, `close`.

    Every method blocks and may be called from any thread; `kill_all` may be called while `exec` runs, which then ends.
    All raise `InfraError` for what the sandbox itself does wrong; what a command does is an `ExecResult`.
    """

    id: str
    root: Path
    """The sandbox's own folder on the host; the agent sees only the workdir of it."""
    workdir: Path
    """The agent's workdir as the host sees it."""

    def start(self) -> None:
        """Make the place ready. What it leaves when the process dies half-way is swept by its lease (CASES 40)."""
        ...

    def exec(self, command: str, timeout: float, env: Mapping[str, str] | None = None) -> ExecResult:
        """Run a command with bash in the workdir. It ends with its main process; background children stay."""
        ...

    def listen(self) -> socket.socket:
        """A socket that listens on a free port of the sandbox's own 127.0.0.1; nothing else of the network is inside."""
        ...

    def kill_commands(self) -> None:
        """Kill what commands left running, stopped or not; the place stays, and commands can be run in it."""
        ...

    def kill_all(self) -> float:
        """Kill every process inside, see that none is left, and return when that was (unix seconds)."""
        ...

    def run_sealed(self, run: Sealed, timeout: float) -> ExecResult:
        """Run in a place that nothing of the agent's could write but its workdir; nothing of the run survives it."""
        ...

    def oom_kills(self) -> int:
        """Processes that the memory limit has killed so far."""
        ...

    def abort(self) -> None:
        """Kill everything, sealed runs too, whatever state it is in; what was under way ends, nothing new starts."""
        ...

    def close(self) -> None:
        """Remove everything; processes first."""
        ...
