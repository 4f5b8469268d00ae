"""A held set of namespaces with commands run inside by nsenter: what both the agent and, later, the verifier get.

The first process is `cat` on a pipe of ours, with its children reaped by the kernel: nothing inside can kill it, and it
ends, with everything else inside, when this process ends for whatever reason.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox import folders, kernel
from rl360.agents.sandbox.base import LABEL, PATH, ExecResult, Limits
from rl360.agents.sandbox.cgroups import Cgroup
from rl360.agents.sandbox.disk import Disk
from rl360.agents.sandbox.host import Host
from rl360.agents.sandbox.others import kill_others
from rl360.agents.sandbox.process import Captured, capture, status_of, text
from rl360.agents.sandbox.space import KILL_SECONDS, Space
from rl360.bus.events import Boundary, Cause

_REAP_SECONDS: Final = 1.0

_LISTEN: Final = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [listener.fileno()])
"""
"""Run with the network of a place: a socket keeps the network that it was made in, whoever holds it."""


class Place:
    """Namespaces of one uid with some folders mounted. `label` names it in the environment of its processes."""

    def __init__(self, host: Host, *, label: str, uid: int, limits: Limits, group: Cgroup | None, cwd: str, info: Path, disk: Disk) -> None:
        self._host, self._label, self._uid = host, label, uid
        self._limits, self._group, self._cwd, self._info, self._disk = limits, group, cwd, info, disk
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()  # of `_running` and `_killed`
        self._killing = threading.Lock()
        self._space: Space | None = None
        self._killed = self._empty = False

    def start(self, read_only: Mapping[str, Path], writable: Mapping[str, Path], timeout: float) -> None:
        """Make the namespaces. Raises InfraError."""
        end = time.monotonic() + timeout
        argv = self._host.namespaces(self._uid, folders.mounted())
        argv += [x for inside, folder in writable.items() for x in ("--bind", self._disk.path_inside(folder), inside)]
        argv += [x for inside, folder in read_only.items() for x in ("--ro-bind", self._disk.path_inside(folder), inside)]
        argv += ["--remount-ro", "/", "--setenv", LABEL, self._label, "--chdir", self._cwd, "--info-fd", "{info}", "--as-pid-1"]
        argv += [self._host.env, "--ignore-signal=CHLD", self._host.cat]
        argv = self._host.launcher(self._group, self._limits, self._disk.inside(argv), inside=False)
        with self._killing:
            if self._killed:
                raise self._gone()
            # The label is there from the first moment, so a sweep finds it even half-way.
            self._space = Space(argv, {"PATH": PATH, LABEL: self._label}, self._info, timeout)
            folders.bound(self._host, self._disk, self._space.pid, self._limits, max(0.0, end - time.monotonic()))

    def exec(self, argv: Sequence[str], env: Mapping[str, str], timeout: float) -> ExecResult:
        """Run `argv` inside. Raises InfraError when the place is gone."""
        space = self._alive()
        command = [*self._host.enter(space.pid, self._uid, env), *argv]
        with self._lock:
            if self._killed:
                raise self._gone()
            child = self._spawned(command)
            self._running.add(child)
        try:
            got = capture(child, timeout, lambda: _kill_group(child))
        finally:
            with self._lock:
                self._running.discard(child)
        if space.dead:
            raise self._gone()
        return _result(child, got)

    def listen(self, timeout: float) -> socket.socket:
        """A listening socket on a free port of the place's own loopback, made there and handed out. Raises OSError."""
        ours, theirs = socket.socketpair()
        argv = [*self._host.enter_network(self._alive().pid), sys.executable, "-S", "-E", "-c", _LISTEN, str(theirs.fileno())]
        with ours, theirs:
            subprocess.run(argv, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=True)
            _, (fd, *_), _, _ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=fd)

    def kill_commands(self) -> None:
        """Kill everything inside but the first process. Raises InfraError when the place is gone."""
        kill_others(self._alive().pid)

    def kill_all(self) -> None:
        """Kill everything inside and see that nothing is left; nothing starts after it. Raises InfraError.

        It waits for a start that is under way, and a second call for the first; a call after one that failed tries again.
        """
        with self._killing:
            with self._lock:
                self._killed = True  # from here on no command is started
                running = tuple(self._running)
            if self._space is not None and not self._empty:
                self._kill_space(self._space, running)
                self._empty = True

    def _kill_space(self, space: Space, running: Sequence[subprocess.Popen[bytes]]) -> None:
        for child in running:  # nsenter stops along with a stopped command, and then reaps nothing
            with suppress(ProcessLookupError):
                child.send_signal(signal.SIGCONT)
        space.kill()
        space.close()
        if self._group is not None and (left := self._group.kill(time.monotonic() + KILL_SECONDS)):
            raise InfraError(Boundary.SANDBOX, Cause.LOST, f"processes {sorted(left)} of a sandbox outlived SIGKILL by {KILL_SECONDS:g} s")

    def _spawned(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Started by a thread that gave up new privileges for all that it starts: one program less than setpriv, 2 ms of CPU."""
        if not self._host.rooted:
            return self._spawn(command)

        def start() -> subprocess.Popen[bytes]:
            kernel.no_new_privs()
            return self._spawn(command)

        with ThreadPoolExecutor(1, "spawn") as once:
            return once.submit(start).result()

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self._host.launcher(self._group, self._limits, command, inside=True),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as e:
            raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"a command can't be started: {e}", exception=type(e).__name__) from e

    def _alive(self) -> Space:
        if self._space is None or self._space.dead:
            raise self._gone()
        return self._space

    def _gone(self) -> InfraError:
        if self._killed:
            return InfraError(Boundary.SANDBOX, Cause.CANCELLED, "the sandbox was killed by its runner")
        if self._group is not None and self._group.oom_kills():
            return InfraError(Boundary.SANDBOX, Cause.OUT_OF_MEMORY, "the memory limit killed the sandbox's first process")
        return InfraError(Boundary.SANDBOX, Cause.LOST, "the sandbox's first process is gone")


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a command and its process group, nsenter last: it must reap its child, or a zombie could hold the namespace up."""
    for pid in _children(child.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGCONT)
    deadline = time.monotonic() + _REAP_SECONDS
    while _children(child.pid) and time.monotonic() < deadline:
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _result(child: subprocess.Popen[bytes], got: Captured) -> ExecResult:
    return ExecResult(status_of(child.returncode), text(got.output), got.truncated or got.flooded, got.timed_out)
