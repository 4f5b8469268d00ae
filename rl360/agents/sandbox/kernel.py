"""System calls that Python 3.11 has no name for. Each is about the calling thread alone. Raises OSError."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_FS: Final = 0x200
_CLONE_NEWNS: Final = 0x20000
_CLONE_NEWNET: Final = 0x40000000
_MS_REC_PRIVATE: Final = 0x4000 | 0x40000
_MS_REMOUNT: Final = 0x20
_MS_NOSUID_NODEV: Final = 0x2 | 0x4
_MNT_DETACH: Final = 2
_PR_SET_NO_NEW_PRIVS: Final = 38


def own_mounts() -> None:
    """From here on this thread, and what it starts, has mounts of its own: what it mounts is seen by nobody else. Takes root."""
    _checked(_libc.unshare(_CLONE_NEWNS))
    _checked(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None))


def mount_tmpfs(folder: Path, options: str) -> None:
    _checked(_libc.mount(b"rl360", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), options.encode()))


def mount_ext4(device: str, folder: Path, options: str) -> None:
    _checked(_libc.mount(device.encode(), os.fsencode(folder), b"ext4", ctypes.c_ulong(0), options.encode()))


def detach(folder: Path) -> None:
    """Unmount what is mounted there; who still has it open keeps it until the end."""
    _checked(_libc.umount2(os.fsencode(folder), _MNT_DETACH))


def enter_mounts(pid: int) -> None:
    """From here on this thread has the mounts of process `pid`, root folder and all. Takes root; a thread goes there to end there."""
    _checked(_libc.unshare(_CLONE_FS))  # its root and its folder are shared with no other thread now
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(namespace, _CLONE_NEWNS))
    finally:
        os.close(namespace)


def remount_tmpfs(folder: str, options: str) -> None:
    _checked(_libc.mount(None, folder.encode(), None, ctypes.c_ulong(_MS_REMOUNT | _MS_NOSUID_NODEV), options.encode()))


def no_new_privs() -> None:
    """Nothing that this thread starts from here on can gain a privilege by what it executes."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def enter_network(namespace: int) -> None:
    """From here on this thread's sockets are of the network that a descriptor of /proc/PID/ns/net names."""
    _checked(_libc.setns(namespace, _CLONE_NEWNET))


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
