"""What this machine offers to sandboxes: programs, privileges, cgroups."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import PATH, Limits
from rl360.agents.sandbox.cgroups import WEAK_LIMITS, Cgroup, Hierarchy
from rl360.bus.events import Boundary, Cause

log = logging.getLogger(__name__)

_FIRST_UID: Final = 61184
_UIDS: Final = 4096
"""Where we are root, each sandbox has one of these uids: systemd keeps them for short-lived services, no person has one."""

_USER_UID: Final = 1000
"""Inside a user namespace, where we are not root."""

_NODES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_TOP: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True, kw_only=True)
class Host:
    """Programs by absolute path; `rooted`: we hold the rights to make namespaces without a user namespace."""

    bwrap: str
    nsenter: str
    setpriv: str
    unshare: str
    shell: str
    bash: str
    env: str
    cat: str
    rooted: bool
    hierarchy: Hierarchy | None

    def uid_of(self, number: int) -> int:
        """Uid of a runner's nth sandbox, on the host where we are root and inside where we are not."""
        return _FIRST_UID + number % _UIDS if self.rooted else _USER_UID

    def launcher(self, group: Cgroup | None, limits: Limits, argv: Sequence[str], *, inside: bool) -> list[str]:
        """`argv` started inside a cgroup; without one, under resource limits of its own, which are weaker (no CPU quota).

        `inside`: `argv` enters a sandbox. Else it makes one, and counts among all processes of this user until it has,
        so no limit on their number is set.
        """
        script = "{ echo 500 >/proc/self/oom_score_adj; ulimit -c 0; } 2>/dev/null; "
        if group is None:
            processes = f"ulimit -u {limits.pids}; " if inside else ""
            script += f'{{ ulimit -v {limits.memory_mb << 10}; {processes}}} 2>/dev/null; exec "$@"'
            return [self.bash, "-c", script, "sandbox", *argv]
        joins = "".join(f'echo 0 >"${n}" || exit 125; ' for n in range(1, len(group.join_files) + 1))
        script += f'{joins}shift {len(group.join_files)}; exec "$@"'
        return [self.shell, "-c", script, "sandbox", *group.join_files, *argv]

    def namespaces(self, uid: int, folders: Sequence[str]) -> list[str]:
        """bwrap and the part of its arguments that every sandbox shares: a read-only system, nothing of ours, no network.

        `folders` mounts what may be written, some of it below /dev, which may not.
        """
        argv = [
            self.bwrap,
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--hostname",
            "sandbox",
            "--cap-drop",
            "ALL",
        ]
        argv += ["--clearenv", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", *_top_folders(), "--proc", "/proc"]
        if self.rooted:
            argv += ["--dev", "/dev"]
        else:
            # bwrap's own --dev makes a second user namespace, which nsenter can't get past.
            argv += ["--unshare-user", "--uid", str(uid), "--gid", str(uid), "--perms", "0755", "--tmpfs", "/dev"]
            argv += [x for node in _NODES for x in ("--dev-bind", f"/dev/{node}", f"/dev/{node}")]
            argv += ["--symlink", "/proc/self/fd", "/dev/fd"]
        return [*argv, *folders, "--remount-ro", "/dev", "--symlink", "../tmp", "/var/tmp"]

    def enter(self, pid: int, uid: int, env: Mapping[str, str]) -> list[str]:
        """Argv that runs what follows it inside the namespaces of process `pid`, in its folder, with no privilege and no way to gain one.

        As root, whoever starts it has said already that no privilege can be gained (`kernel.no_new_privs`), and nsenter gives up
        its own by becoming `uid`; else setpriv says so. Both run without `env`: an LD_LIBRARY_PATH of a task may lead to files of
        the agent's. The bounding set stays full: without new privileges it gives nothing.
        """
        into = [self.nsenter, "-t", str(pid), "-m", "-p", "-i", "-u", "-n", "-w"]
        if self.rooted:
            argv = [*into, "-S", str(uid), "-G", str(uid), "--"]
        else:
            argv = [*into, "-U", "--preserve-credentials", "--", self.setpriv, "--no-new-privs", "--"]
        return [*argv, self.env, "--", *(f"{name}={value}" for name, value in env.items())] if env else argv

    def enter_mounts(self, pid: int) -> list[str]:
        """Argv that runs what follows it with the mounts of process `pid`, and all else of ours."""
        return [self.nsenter, "-t", str(pid), *([] if self.rooted else ["-U", "--preserve-credentials"]), "-m", "--"]

    def enter_network(self, pid: int) -> list[str]:
        """Argv that runs what follows it with the network of process `pid` and all else of ours."""
        return [self.nsenter, "-t", str(pid), *([] if self.rooted else ["-U", "--preserve-credentials"]), "-n", "--"]


@cache
def detect() -> Host:
    """This machine. Raises InfraError naming the missing program and its remedy. Warns once when limits are weak."""
    programs = {name: _program(name) for name in ("bwrap", "nsenter", "setpriv", "unshare", "sh", "bash", "env", "cat")}
    hierarchy = Hierarchy.find()
    if hierarchy is None:
        log.warning("%s", WEAK_LIMITS)
    return Host(
        bwrap=programs["bwrap"],
        nsenter=programs["nsenter"],
        setpriv=programs["setpriv"],
        unshare=programs["unshare"],
        shell=programs["sh"],
        bash=programs["bash"],
        env=programs["env"],
        cat=programs["cat"],
        rooted=os.geteuid() == 0 and _starts([programs["bwrap"], "--unshare-pid", "--ro-bind", "/", "/", "true"]),
        hierarchy=hierarchy,
    )


_PACKAGES: Final = {
    **{"bwrap": "bubblewrap", "nsenter": "util-linux", "setpriv": "util-linux", "unshare": "util-linux"},
    **{"bash": "bash", "sh": "dash", "env": "coreutils", "cat": "coreutils"},
}


def _program(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        remedy = f"install the package {_PACKAGES[name]} (Debian, Ubuntu: apt-get install {_PACKAGES[name]})"
        raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"{name} is not in {PATH}: {remedy}")
    return found


def _starts(argv: list[str]) -> bool:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False).returncode == 0


@cache
def _top_folders() -> tuple[str, ...]:
    """/bin, /lib and their like: links into /usr on a merged system, folders on others."""
    argv: list[str] = []
    for name in _TOP:
        path = Path("/", name)
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    return tuple(argv)
