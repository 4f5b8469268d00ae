"""One set of namespaces and its first process, started by bwrap. When that process dies, the kernel kills all others inside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.waiting import readable
from rl360.bus.events import Boundary, Cause

_INFO: Final = re.compile(rb'"child-pid"\s*:\s*(\d+)')
KILL_SECONDS: Final = 10.0


class Space:
    """A running bwrap. `pid` is the first process of its namespaces, as the host counts."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], info: Path, timeout: float) -> None:
        """Start it and wait until its first process, which must be `cat`, echoes: from then on the place is complete.

        `argv` takes bwrap's arguments where "{info}" stands for the file descriptor of --info-fd, which is the file
        `info`: a pipe would kill bwrap half-way, when this process dies, and leave its child waiting for ever.
        The first process reads from a pipe of ours, whose end tells it that we are gone. Raises InfraError.
        """
        self._pidfd = -1
        end = time.monotonic() + timeout
        with info.open("wb") as out:
            try:
                self.process = subprocess.Popen(
                    [a.replace("{info}", str(out.fileno())) for a in argv],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    pass_fds=(out.fileno(),),
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as e:
                raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"{argv[0]}: {e}", exception=type(e).__name__) from e
        self._wait_ready(end - time.monotonic())
        found = _INFO.search(info.read_bytes())
        assert found is not None  # bwrap writes it before its child goes on
        self.pid = int(found[1])
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return  # it ended already, and so did all inside

    @property
    def dead(self) -> bool:
        """The first process is gone, and with it every other."""
        return self._pidfd < 0 or readable(self._pidfd, 0.0)

    def _wait_ready(self, timeout: float) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # what it said instead is read below
            self.process.stdin.write(b"\n")
        if not readable(self.process.stdout.fileno(), timeout):
            self._last_words()
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
            if not readable(self._pidfd, KILL_SECONDS):
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
        """Kill what there is of it (its whole session, since there is no first process to go by) and read what it said."""
        assert self.process.stdout is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(KILL_SECONDS)
        os.set_blocking(self.process.stdout.fileno(), False)
        said = self.process.stdout.read(4096) or b""
        self.close()
        return said.decode(errors="replace").strip() or f"exit status {self.process.returncode}"
