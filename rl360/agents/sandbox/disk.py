"""The folders that an agent can write and that outlive its processes, each a tmpfs of a fixed size.

A full one says "no space left on device" to whoever writes, at once, whatever fills it: small files, inodes, holes that
are filled, space taken by fallocate, files deleted while open. Nothing of it is on a disk of the machine. The mounts lie
in a mount namespace of their own, held by a thread of ours, or, without root, by a process that ends with us, so nothing has to be
unmounted after a crash.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox import kernel
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
_LATE: Final = "the sandbox's disk was not mounted in time"
_REMEDY: Final = "mounting a tmpfs takes root, or user namespaces for everybody"


def files_in(size: int) -> int:
    """How many files and folders a tmpfs of `size` bytes may hold.

    >>> files_in(64 << 20), files_in(1)
    (16384, 1024)
    """
    return max(_LEAST_INODES, size // _BYTES_PER_INODE)


class Disk:
    """Mounted over `folder`, for its own namespace alone: `root` is the way there for this process.

    `root` (`beside` bytes) is for files of ours, `root/app` (`size` bytes) is the agent's workdir.
    """

    def __init__(self, host: Host, folder: Path, *, size: int, beside: int, timeout: float) -> None:
        """Raises InfraError; leaves nothing then."""
        self._host = host
        sizes = [(b, files_in(b)) for b in (beside, size)]
        self._holder = _Thread(folder, sizes, timeout) if host.rooted else _Process(host, folder, sizes, timeout)
        self._way = f"/proc/{self._holder.id}/root"
        self.root = Path(f"{self._way}{folder.absolute()}")

    def path_inside(self, path: Path) -> str:
        """A path of this process where the mounts are: without the way there, which an ordinary user's bwrap may not go."""
        return str(path.absolute()).removeprefix(self._way)

    def inside(self, argv: list[str]) -> list[str]:
        """`argv` run where the mounts are."""
        return [*self._host.enter_mounts(self._holder.id), *argv]

    def close(self) -> None:
        """Let go of it; its bytes are freed when no sandbox has it mounted. Raises TimeoutExpired."""
        self._holder.close()


class _Thread:
    """Holds the mounts as root: a thread of ours with mounts of its own, which cost no process."""

    def __init__(self, folder: Path, sizes: Sequence[tuple[int, int]], timeout: float) -> None:
        self.id = 0  # of the thread, under which /proc knows it
        self._folder, self._sizes = folder.absolute(), sizes
        self._mounted, self._end = threading.Event(), threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._hold, name="disk", daemon=True)
        self._thread.start()
        if self._mounted.wait(timeout) and self._error is None:
            return
        self.close()
        if self._error is None:
            raise InfraError(Boundary.SANDBOX, Cause.TIMEOUT, _LATE)
        raise InfraError(
            Boundary.SANDBOX, Cause.START_FAILED, f"the sandbox's disk can't be mounted: {self._error}; {_REMEDY}"
        ) from self._error

    def _hold(self) -> None:
        self.id = threading.get_native_id()
        try:
            kernel.own_mounts()
            (beside, beside_inodes), (size, inodes) = self._sizes
            kernel.mount_tmpfs(self._folder, f"mode=0711,size={beside},nr_inodes={beside_inodes}")
            app = self._folder / "app"
            app.mkdir()
            kernel.mount_tmpfs(app, f"mode=0755,size={size},nr_inodes={inodes}")
        except OSError as e:
            self._error = e
        self._mounted.set()
        self._end.wait()

    def close(self) -> None:
        self._end.set()
        self._thread.join(_END_SECONDS)


class _Process:
    """Holds the mounts as an ordinary user: a process in a user namespace of its own, which a thread can't have."""

    def __init__(self, host: Host, folder: Path, sizes: Sequence[tuple[int, int]], timeout: float) -> None:
        self._process = subprocess.Popen(
            [host.unshare, "--user", "--map-root-user", "--mount", host.shell, "-c", _MOUNT, "disk", str(folder)]
            + [str(number) for pair in sizes for number in pair],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": PATH},
            start_new_session=True,
            bufsize=0,
        )
        self.id = self._process.pid
        self._wait_ready(time.monotonic() + timeout)

    def close(self) -> None:
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
            raise InfraError(Boundary.SANDBOX, Cause.TIMEOUT, _LATE)
        why = f"the sandbox's disk can't be mounted: {said.decode(errors='replace').strip() or 'unshare ended without a word'}"
        raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"{why}; {_REMEDY}")
