"""One command in a running container: byte-exact output, bounded, with a deadline that ends the command and not only our wait.

The first process of the container is a shell that reads process groups to kill from us, so a kill needs no new process
and works in a container that may have no more. It ends with its input, that is, with the runner.

While a process that the daemon just started in a container is stopped, which whoever runs inside can see to, the daemon answers
nothing about that container. So no wait for it goes on for ever: what is inside is killed from outside, and it answers.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import OUTPUT_LIMIT, ExecResult
from rl360.agents.sandbox.docker.engine import CALL_SECONDS, Engine
from rl360.agents.sandbox.docker.inside import end_in, kill_in
from rl360.agents.sandbox.docker.stream import Kept, follow, hijack
from rl360.agents.sandbox.process import FLOOD_LIMIT, text
from rl360.bus.events import Boundary, Cause

FIRST: Final = (
    "/bin/bash",
    "-c",
    # The label is in the first process's own environment, and in no command's.
    'trap "" TERM INT HUP QUIT; RL360_SANDBOX="$1" exec /bin/bash -c "$2"',
    "sandbox",
)
"""Start of the argv of a container's first process; its label and `FIRST_SCRIPT` follow."""

FIRST_SCRIPT: Final = 'trap "" TERM INT HUP QUIT; while read -r group; do kill -9 -- "-$group"; done 2>/dev/null'

_WRAPPER: Final = r"""echo $$; /bin/bash -c "$1" bash 2>&1 </dev/null; s=$?; printf '\0%s %s\n' "$2" "$s" """
"""Says its process group first and the command's status last. A command that forges the last line forges its own status."""

_KILLED: Final = 137
_KILL_SECONDS: Final = 10.0
_NOTICE_SECONDS: Final = 0.5


@dataclass(frozen=True)
class Held:
    """A running container, the connection to its first process's input, and that process's number on the daemon's machine."""

    engine: Engine
    container: str
    keeper: socket.socket
    label: str
    pid: int = 0  # not started yet

    def kill_commands(self) -> bool:
        """Kill all but the first process, without the daemon; False where that can't be done from here."""
        return kill_in(self.pid, self.label)

    def end(self) -> None:
        """Kill all, without the daemon, where that can be done from here."""
        end_in(self.pid, self.label)


class Said:
    """What came out of the wrapper so far. Pure.

    >>> said = Said("n0")
    >>> said.feed(b"12\\nhi"), said.feed(b"\\n\\0n0 3\\n"), said.group, said.output, said.status
    (None, None, 12, b'hi\\n', 3)
    """

    def __init__(self, nonce: str, keep: int = OUTPUT_LIMIT) -> None:
        self._mark = b"\0" + nonce.encode() + b" "
        self._keep = keep
        self._kept = Kept(keep)
        self._tail = b""  # the last bytes, in which the mark may begin
        self.group: int | None = None
        self.status: int | None = None

    def feed(self, data: bytes) -> None:
        if self.status is not None:
            return
        if self.group is None:
            line, end, data = (self._tail + data).partition(b"\n")
            self._tail = b"" if end else line
            if not end:
                return
            self.group = int(line) if line.isdigit() else 0
        self._take(self._tail + data)

    def _take(self, data: bytes) -> None:
        at = data.find(self._mark)
        if at >= 0:
            rest = data[at + len(self._mark) :]
            if rest.endswith(b"\n"):
                self._kept.add(data[:at])
                self._tail, self.status = b"", int(rest) if rest.strip().isdigit() else 255
                return
            hold = len(data) - at
        else:
            hold = min(len(data), len(self._mark) - 1)
        self._kept.add(data[: len(data) - hold])
        self._tail = data[len(data) - hold :]

    @property
    def total(self) -> int:
        return self._kept.total + (len(self._tail) if self.group is not None else 0)

    @property
    def output(self) -> bytes:
        return (self._kept.data + (self._tail if self.group is not None else b""))[: self._keep]


def run(held: Held, command: str, timeout: float, env: Mapping[str, str], cwd: str) -> ExecResult:
    """Run it. Raises what the SDK raises, OSError, and InfraError when a command can't be killed.

    One that did not begin in time is over like one that did not end, where all could be killed: whether the sandbox still
    starts what it is asked to is the caller's next question.
    """
    deadline = time.monotonic() + timeout
    nonce = secrets.token_hex(8)
    argv = ["/bin/bash", "-c", _WRAPPER, "rl360", command, nonce]
    engine, said = held.engine, Said(nonce)
    with _freed(held, timeout, lambda: said.group is None) as freed:
        try:
            made = engine.api.exec_create(held.container, argv, environment=dict(env), workdir=cwd)["Id"]
            link, rest = hijack(engine.address, f"/exec/{made}/start", {"Detach": False, "Tty": False}, CALL_SECONDS)
            with link:
                ended = follow(link, rest, deadline, said.feed, lambda: said.status is not None or said.total > FLOOD_LIMIT)
        except (OSError, engine.errors.DockerException):
            if not freed.is_set():
                raise
            return ExecResult(_KILLED, "", False, timed_out=True)
    if said.status is not None:
        return ExecResult(said.status, text(said.output), said.total > OUTPUT_LIMIT)
    with _freed(held, _KILL_SECONDS):
        if ended and not freed.is_set():
            _outlived(engine, held.container)
            return ExecResult(_ended(engine, made, 0.0), text(said.output), said.total > OUTPUT_LIMIT)
        flooded = said.total > FLOOD_LIMIT
        if said.group:
            held.keeper.sendall(b"%d\n" % said.group)
        elif not held.kill_commands():
            raise InfraError(Boundary.SANDBOX, Cause.LOST, f"the Docker daemon did not start a command in {timeout:.1f} s")
        status = _ended(engine, made, _KILL_SECONDS)
    return ExecResult(status, text(said.output), flooded or said.total > OUTPUT_LIMIT, timed_out=not flooded)


@contextmanager
def _freed(held: Held, seconds: float, held_up: Callable[[], bool] = lambda: True) -> Generator[threading.Event]:
    """Kill what is inside after so many seconds, when what is waited for is then `held_up`; whether it was killed."""
    freed = threading.Event()

    def free() -> None:
        if held_up() and held.kill_commands():
            freed.set()

    timer = threading.Timer(seconds, free)
    timer.daemon = True
    timer.start()
    try:
        yield freed
    finally:
        timer.cancel()


def _outlived(engine: Engine, container: str) -> None:
    """A command that ended without its last line was killed: alone, or with the whole container, which the daemon sees a moment later."""
    end = time.monotonic() + _NOTICE_SECONDS
    while time.monotonic() < end:
        if not engine.state(container)["Running"]:
            raise InfraError(Boundary.SANDBOX, Cause.LOST, "the container ended under a command")
        time.sleep(0.02)


def _ended(engine: Engine, made: str, seconds: float) -> int:
    """Exit status of a command that ends now. Raises InfraError when it doesn't."""
    end = time.monotonic() + max(seconds, 1.0)
    while True:
        state = engine.api.exec_inspect(made)
        if not state["Running"] and state["ExitCode"] is not None:
            return int(state["ExitCode"])
        if time.monotonic() > end:
            raise InfraError(Boundary.SANDBOX, Cause.LOST, f"a command outlived SIGKILL by {seconds:g} s")
        time.sleep(0.01)
