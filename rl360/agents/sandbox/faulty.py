"""A sandbox that a fault of the recipe strikes. The failure is real and takes the usual way to its outcome; only its cause is ours.

sandbox_kill    at the agent's first command the processes that hold the sandbox are killed (SIGKILL), and so all inside
sandbox_hang    from the agent's first command on, every command stops itself (SIGSTOP) before it does anything
verifier_break  the verifier finds an empty /tests
verifier_hang   the verifier stops itself (SIGSTOP)
An agent that runs no command is not struck by the first two.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import LABEL, ExecResult, Sandbox, Sealed
from rl360.agents.sandbox.leases import labelled
from rl360.bus.events import Boundary, Cause
from rl360.config import FaultKind

_STOP: Final = "kill -STOP $$"
_KILL_SECONDS: Final = 10.0


class FaultySandbox:
    """`inner` with one fault. `announce` is called once, before it strikes, from the thread that is struck."""

    def __init__(self, inner: Sandbox, kind: FaultKind, announce: Callable[[], None]) -> None:
        self._inner, self._kind, self._announce = inner, kind, announce
        self.id, self.root, self.workdir = inner.id, inner.root, inner.workdir
        self._struck = False

    def start(self) -> None:
        self._inner.start()
        self.root, self.workdir = self._inner.root, self._inner.workdir

    def exec(self, command: str, timeout: float, env: Mapping[str, str] | None = None) -> ExecResult:
        if self._kind == "sandbox_kill":
            self._strike(self._kill)
        elif self._kind == "sandbox_hang":
            self._strike()
            command = f"{_STOP}\n{command}"
        return self._inner.exec(command, timeout, env)

    def run_sealed(self, run: Sealed, timeout: float) -> ExecResult:
        if self._kind == "verifier_break":
            self._strike()
            empty = Path(tempfile.mkdtemp(dir=self.root))
            run = replace(run, read_only=dict.fromkeys(run.read_only, empty))
        elif self._kind == "verifier_hang":
            self._strike()
            run = replace(run, argv=("/bin/bash", "-c", _STOP))
        return self._inner.run_sealed(run, timeout)

    def listen(self) -> socket.socket:
        return self._inner.listen()

    def kill_commands(self) -> None:
        self._inner.kill_commands()

    def kill_all(self) -> float:
        return self._inner.kill_all()

    def oom_kills(self) -> int:
        return self._inner.oom_kills()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()

    def _strike(self, act: Callable[[], None] | None = None) -> None:
        if self._struck:
            return
        self._struck = True
        self._announce()
        if act is not None:
            act()

    def _kill(self) -> None:
        """As an outage would: from outside, by the label of the sandbox's processes."""
        label = f"{LABEL}={self.root.parent.name}/{self.id}\0".encode()
        deadline = time.monotonic() + _KILL_SECONDS
        while left := labelled(label):
            if time.monotonic() > deadline:
                raise InfraError(Boundary.SANDBOX, Cause.LOST, f"processes {left} of a sandbox outlived SIGKILL by {_KILL_SECONDS:g} s")
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
