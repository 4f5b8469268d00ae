"""One set of namespaces and its first process, started by bwrap. When that process dies, the kernel kills all others inside."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.bus.events import Boundary, Cause

_INFO: Final = re.compile(rb'"child-pid"\s*:\s*(\d+)')
KILL_SECONDS: Final = 10.0


class Space:
    """A running bwrap. `pid` is the first process of its namespaces, as the host counts."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, held: bool, timeout: float) -> None:
        """Start it. `argv` must take bwrap's arguments where "{info}" stands for the file descriptor of --info-fd.

        `held`: stdin is a pipe of ours, whose end tells the first process that we are gone.
        Raises InfraError when bwrap doesn't get as far as making the first process.
        """
        info_in, info_out = os.pipe()
        try:
            self.process = subprocess.Popen(
                [a.replace("{info}", str(info_out)) for a in argv],
                stdin=subprocess.PIPE if held else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env),
                pass_fds=(info_out,),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as e:
            os.close(info_in)
            raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"{argv[0]}: {e}", exception=type(e).__name__) from e
        finally:
            os.close(info_out)
        try:
            self.pid = _first_pid(info_in, time.monotonic() + timeout)
            self._pidfd = os.pidfd_open(self.pid) if self.pid else -1
        except ProcessLookupError:
            self._pidfd = -1  # it ended already, and so did all inside
        finally:
            os.close(info_in)
        if not self.pid:
            said = self._last_words()
            raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"bwrap started no process in {timeout:.1f} s: {said}")

    @property
    def dead(self) -> bool:
        """The first process is gone, and with it every other."""
        return self._pidfd < 0 or bool(_readable(self._pidfd, 0.0))

    def wait_ready(self, timeout: float) -> None:
        """Wait until the held first process (`cat`) echoes: from then on the place is complete. Raises InfraError."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # what it said instead is read below
            self.process.stdin.write(b"\n")
        if not _readable(self.process.stdout.fileno(), timeout):
            self.kill()
            raise InfraError(Boundary.SANDBOX, Cause.TIMEOUT, f"the sandbox was not ready in {timeout:.1f} s")
        said = os.read(self.process.stdout.fileno(), 4096)
        if said != b"\n":
            said += self._last_words().encode()
            raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"bwrap: {said.decode(errors='replace').strip()}")
        self.process.stdout.close()

    def kill(self) -> None:
        """Kill the first process, and so all; returns when the kernel has seen them end. Raises InfraError after 10 s."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            if not _readable(self._pidfd, KILL_SECONDS):
                raise InfraError(Boundary.SANDBOX, Cause.LOST, f"process {self.pid} of a sandbox outlived SIGKILL by {KILL_SECONDS:g} s")
        self.process.wait(KILL_SECONDS)

    def close(self) -> None:
        """Let go of descriptors. The first process of a held space ends by this too."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _last_words(self) -> str:
        """Kill what there is of bwrap and read what it said."""
        self.process.kill()
        self.process.wait(KILL_SECONDS)
        assert self.process.stdout is not None
        said = b""
        if not self.process.stdout.closed:
            os.set_blocking(self.process.stdout.fileno(), False)
            said = self.process.stdout.read(4096) or b""
        self.close()
        return said.decode(errors="replace").strip() or f"exit status {self.process.returncode}"


def _first_pid(info: int, deadline: float) -> int:
    """Pid that bwrap writes on its info descriptor; 0 when it closes it (or dies) without, or at the deadline."""
    said = b""
    while _readable(info, max(0.0, deadline - time.monotonic())):
        part = os.read(info, 4096)
        said += part
        if not part:  # read to the end: bwrap dies of a pipe that is closed while it writes
            break
    match = _INFO.search(said)
    return int(match[1]) if match else 0


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
