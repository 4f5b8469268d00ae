"""The folders that an agent can write and that outlive its processes, each a tmpfs of a fixed size.

A full one says "no space left on device" to whoever writes, at once, whatever fills it: small files, inodes, holes that
are filled, space taken by fallocate, files deleted while open. Nothing of it is on a disk of the machine. The mounts lie
in a mount namespace of their own, held by a process that ends with ours, so nothing has to be unmounted after a crash.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import PATH
from rl360.agents.sandbox.host import Host
from rl360.agents.sandbox.waiting import readable
from rl360.bus.events import Boundary, Cause

_MOUNT: Final = (
    'set -e; mount -t tmpfs -o "mode=0711,size=$2,nr_inodes=$3" rl360 "$1"; '
    'mount -t tmpfs -o "mode=0755,size=$4,nr_inodes=$5,X-mount.mkdir" rl360 "$1/app"; read -r _; echo; read -r _'
)
"""It answers a line when both are mounted, and ends with our end of its pipe. Each program saved is 1 ms of CPU."""
_BYTES_PER_INODE: Final = 4096
"""An empty file costs the kernel about 1 KiB, which no size of a tmpfs counts: so their number has a limit too."""
_LEAST_INODES: Final = 1024
_END_SECONDS: Final = 10.0


class Disk:
    """Mounted over `folder`, for its own namespace alone: `root` is the way there for this process.

    `root` (`beside` bytes) is for files of ours, `root/app` (`size` bytes) is the agent's workdir.
    """

    def __init__(self, host: Host, folder: Path, *, size: int, beside: int, timeout: float) -> None:
        """Raises InfraError; leaves no process then."""
        self._host = host
        user = [] if host.rooted else ["--user", "--map-root-user"]
        sizes = [str(n) for b in (beside, size) for n in (b, max(_LEAST_INODES, b // _BYTES_PER_INODE))]
        self._process = subprocess.Popen(
            [host.unshare, *user, "--mount", host.shell, "-c", _MOUNT, "disk", str(folder), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": PATH},
            start_new_session=True,
            bufsize=0,
        )
        self._way = f"/proc/{self._process.pid}/root"
        self.root = Path(f"{self._way}{folder.absolute()}")
        self._wait_ready(time.monotonic() + timeout)

    def path_inside(self, path: Path) -> str:
        """A path of this process where the mounts are: without the way there, which an ordinary user's bwrap may not go."""
        return str(path.absolute()).removeprefix(self._way)

    def inside(self, argv: list[str]) -> list[str]:
        """`argv` run where the mounts are."""
        return [*self._host.enter_mounts(self._process.pid), *argv]

    def close(self) -> None:
        """Let go of it; its bytes are freed when no sandbox has it mounted. Raises TimeoutExpired."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(_END_SECONDS)  # only from here on may another process have its number

    def _wait_ready(self, end: float) -> None:
        """Give it the line that it answers. Raises InfraError, after its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # what it said instead is read below
            self._process.stdin.write(b"\n")
        out = self._process.stdout.fileno()
        ready = readable(out, end - time.monotonic())
        said = os.read(out, 4096) if ready else b""
        if said == b"\n":
            return
        self.close()
        if not ready:
            raise InfraError(Boundary.SANDBOX, Cause.TIMEOUT, "the sandbox's disk was not mounted in time")
        why = f"the sandbox's disk can't be mounted: {said.decode(errors='replace').strip() or 'unshare ended without a word'}"
        raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"{why}; mounting a tmpfs takes root, or user namespaces for everybody")
