"""Plain processes of this user, for machines without namespaces, and only when asked for by name. It isolates nothing.

The paths of a task (/app, /tests, /logs, /solution) don't exist here: they are rewritten in commands and in copies of
the tests and of the oracle, as text. The agent's processes are found by a variable in their environment, which an agent can clear.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rl360.agents.outcomes import InfraError, boundary
from rl360.agents.sandbox.base import LABEL, PATH, ExecResult, Sealed
from rl360.agents.sandbox.leases import Lease, labelled, remove_tree
from rl360.agents.sandbox.process import capture, status_of, text
from rl360.bus.events import Boundary, Cause

_KILL_SECONDS: Final = 10.0


class SubprocessSandbox:
    """The same promises as far as plain processes can keep them: no limits, the machine's network, its files in reach."""

    def __init__(
        self,
        lease: Lease,
        name: str,
        *,
        workdir: str,
        files: Path | None,
        env: Mapping[str, str],
        read_only: Mapping[str, Path] | None = None,
    ) -> None:
        self.id = name
        self._lease, self._inside, self._files, self._env = lease, workdir, files, env
        self.root = lease.folder / name
        self.workdir = self.root / "app"
        self._read_only = read_only or {}
        self._places = {workdir: self.workdir, "/logs": self.root / "logs"}
        self._killed = threading.Event()

    def start(self) -> None:
        with boundary(Boundary.SANDBOX):
            self._lease.open(self.id, None)
            if self._files is None:
                self.workdir.mkdir()
            else:
                shutil.copytree(self._files, self.workdir, symlinks=True)
            self._places = _copied(self._read_only, self.root / "read_only", self._places)

    def exec(self, command: str, timeout: float, env: Mapping[str, str] | None = None) -> ExecResult:
        if self._killed.is_set():
            raise InfraError(Boundary.SANDBOX, Cause.CANCELLED, "the sandbox was killed by its runner")
        return self._run(["/bin/bash", "-c", _rewritten(command, self._places), "bash"], {**self._env, **(env or {})}, timeout)

    def listen(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0), backlog=64)

    def kill_commands(self) -> None:
        self._kill_labelled()

    def kill_all(self) -> float:
        self._killed.set()
        self._kill_labelled()
        return time.time()

    def run_sealed(self, run: Sealed, timeout: float) -> ExecResult:
        with boundary(Boundary.SANDBOX):
            places = _copied(run.read_only, self.root / "sealed", {self._inside: self.workdir, **run.writable})
            argv = [_rewritten(word, places) for word in run.argv]
            try:
                return self._run(argv, run.env, timeout)
            finally:
                self._kill_labelled()

    def oom_kills(self) -> int:
        return 0  # there is no limit that could kill

    def abort(self) -> None:
        self._killed.set()
        self._kill_labelled()

    def close(self) -> None:
        with boundary(Boundary.SANDBOX):
            self.abort()
            remove_tree(self.root)

    def _run(self, argv: Sequence[str], env: Mapping[str, str], timeout: float) -> ExecResult:
        with boundary(Boundary.SANDBOX):
            child = subprocess.Popen(
                argv,
                cwd=self.workdir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={"PATH": PATH, "HOME": str(self.root), "LANG": "C.UTF-8", LABEL: self._lease.label(self.id), **env},
                start_new_session=True,
                bufsize=0,
            )
            got = capture(child, timeout, lambda: os.killpg(child.pid, signal.SIGKILL))
        return ExecResult(status_of(child.returncode), text(got.output), got.truncated or got.flooded, got.timed_out)

    def _kill_labelled(self) -> None:
        label = f"{LABEL}={self._lease.label(self.id)}\0".encode()
        deadline = time.monotonic() + _KILL_SECONDS
        while left := labelled(label):
            if time.monotonic() > deadline:
                raise InfraError(Boundary.SANDBOX, Cause.LOST, f"processes {left} of a sandbox outlived SIGKILL by {_KILL_SECONDS:g} s")
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


def _rewritten(command: str, places: Mapping[str, Path]) -> str:
    """Replace the paths of a task by where they are here.

    >>> _rewritten("cat /app/x /apple", {"/app": Path("/h/app")})
    'cat /h/app/x /apple'
    """
    for inside in sorted(places, key=len, reverse=True):
        host = str(places[inside])
        command = re.sub(rf"(?<![\w./-]){re.escape(inside)}(?![\w.-])", lambda _, to=host: to, command)
    return command


def _copied(folders: Mapping[str, Path], into: Path, places: Mapping[str, Path]) -> dict[str, Path]:
    """Copy `folders` {path inside: folder} below `into` and rewrite what they say; `places` with the copies' places."""
    copies = {inside: into / str(number) for number, inside in enumerate(folders)}
    places = {**places, **copies}
    for inside, copy in copies.items():
        shutil.copytree(folders[inside], copy, symlinks=True)
        for file in copy.rglob("*"):
            if file.is_file() and not file.is_symlink():
                _rewrite(file, places)
    return places


def _rewrite(file: Path, places: Mapping[str, Path]) -> None:
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return  # not a script
    file.write_text(_rewritten(content, places), encoding="utf-8")
