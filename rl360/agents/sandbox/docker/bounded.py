"""A hard limit on what a container writes: a file system of a fixed size over its writable layer and over each of its volumes.

It lies in a sparse file without a name on the daemon's own disk, and is mounted before the container starts. A full one says
"no space left on device" to whoever writes, at once, whatever fills it; it bounds the number of files as well. The daemon
unmounts a layer's when it removes the container, `release` unmounts a volume's, and the file's bytes are freed then.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox import kernel
from rl360.agents.sandbox.base import PATH
from rl360.bus.events import Boundary, Cause

if TYPE_CHECKING:
    from rl360.agents.sandbox.docker.engine import Engine

log = logging.getLogger(__name__)

UNBOUNDED: Final = (
    "what a container writes in all can't be bounded, only each file (%s); run the runner as root in the daemon's own "
    "mount namespace with e2fsprogs, or put the daemon's data root on xfs with pquota or on a disk of its own"
)

_BYTES_PER_INODE: Final = 4096
_INODE: Final = 256  # bytes of one, which lie in the file system too
_SLACK: Final = 4 << 20  # of everything else that mkfs lays down
_BLOCK: Final = 4096
_TRY_SECONDS: Final = 10.0
_LOOP_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_CONFIG: Final = "II5Q4I64s64s32s2Q8Q"
_AUTOCLEAR: Final = 4  # the device lets go of its file with the last mount


def same_mounts(address: str) -> bool:
    """Whether the daemon at `address` sees what this process mounts: both have one mount namespace, and we are root."""
    at = urlsplit(address)
    if at.scheme != "unix" or os.geteuid() != 0:
        return False
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(at.path)
            pid, _, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid > 0 and os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return False


def bound_container(engine: Engine, container: str, limit: int, seconds: float) -> None:
    """Let an unstarted container write `limit` bytes more in its layer, and as much in each volume that is not bounded yet.

    Does nothing where this machine can't (`unbounded`). Raises OSError, and InfraError after `seconds`.
    """
    end = time.monotonic() + seconds
    for folder in () if unbounded(engine) else _folders(engine, container):
        if not folder.is_mount():
            bound(folder, limit, end - time.monotonic())


def unbounded(engine: Engine) -> str:
    """`why_not` of an engine, tried once and told in the log."""
    with engine.bounding:
        if engine.unbounded is None:
            engine.unbounded = why_not(engine)
            if engine.unbounded:
                log.warning(UNBOUNDED, engine.unbounded)
        return engine.unbounded


def why_not(engine: Engine) -> str:
    """Why what a container writes can't be bounded by this process; "" when it can: it was tried."""
    if not engine.here:
        return "the daemon does not see this process's mounts"
    if engine.info["Driver"] != "overlay2":
        return f"the daemon's storage driver is {engine.info['Driver']}, and only overlay2's layers are known"
    try:
        with tempfile.TemporaryDirectory(prefix="rl360-", dir=engine.info["DockerRootDir"]) as root:
            folder = Path(root, "tried")
            folder.mkdir()
            bound(folder, 0, _TRY_SECONDS)
            release(folder)
    except (OSError, InfraError) as e:
        return str(e)
    return ""


def bound(folder: Path, limit: int, seconds: float) -> None:
    """Mount a file system over `folder` that holds what is there and has room for `limit` bytes more.

    Raises OSError, and InfraError after `seconds`.
    """
    owner = folder.stat()
    size = (_used(folder) + limit) * (_BYTES_PER_INODE + _INODE) // _BYTES_PER_INODE + _SLACK
    fd = os.open(folder.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        _make(fd, folder, seconds)
        number, device = _attach(fd)
        with os.fdopen(device, "rb"):
            kernel.mount_ext4(f"/dev/loop{number}", folder, "noinit_itable")
    finally:
        os.close(fd)
    (folder / "lost+found").rmdir()
    os.chown(folder, owner.st_uid, owner.st_gid)
    folder.chmod(owner.st_mode & 0o7777)


def release(folder: Path) -> None:
    """Unmount it, where it was bounded. Raises OSError."""
    if folder.is_mount():
        kernel.detach(folder)


def _folders(engine: Engine, container: str) -> list[Path]:
    seen = engine.api.inspect_container(container)
    folders = [Path(m["Source"]) for m in seen["Mounts"] if m["Type"] == "volume"]
    if not engine.quota:
        folders.append(Path(seen["GraphDriver"]["Data"]["UpperDir"]).parent)
    return folders


def _used(folder: Path) -> int:
    """Bytes that a copy of it takes, a block for each name included."""
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                total += _BLOCK + os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def _make(fd: int, folder: Path, seconds: float) -> None:
    program = shutil.which("mkfs.ext4", path=PATH)
    if program is None:
        raise OSError("mkfs.ext4 is missing: install e2fsprogs")
    argv = [program, "-q", "-F", "-b", str(_BLOCK), "-i", str(_BYTES_PER_INODE), "-I", str(_INODE), "-m", "0", "-O", "^has_journal"]
    argv += ["-E", "nodiscard,lazy_itable_init=1", "-d", str(folder), f"/proc/self/fd/{fd}"]
    try:
        done = subprocess.run(argv, pass_fds=(fd,), stdin=subprocess.DEVNULL, capture_output=True, timeout=max(0.0, seconds), check=False)
    except subprocess.TimeoutExpired:
        why = f"the file system for {folder} was not made in the {seconds:.1f} s that were left; raise budgets.setup"
        raise InfraError(Boundary.SANDBOX, Cause.TIMEOUT, why) from None
    if done.returncode:
        raise OSError(f"mkfs.ext4: {done.stderr.decode(errors='replace').strip()[:300]}")


def _attach(fd: int) -> tuple[int, int]:
    """Number and descriptor of a loop device over the file; it goes when the descriptor and every mount of it are gone."""
    config = struct.pack(_LOOP_CONFIG, fd, 0, 0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, b"rl360", b"", b"", 0, 0, *[0] * 8)
    with open("/dev/loop-control", "rb") as control:
        while True:
            number = fcntl.ioctl(control, _LOOP_FREE)
            device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as e:
                os.close(device)
                if e.errno != errno.EBUSY:  # somebody else took it a moment ago
                    raise
            else:
                return number, device
