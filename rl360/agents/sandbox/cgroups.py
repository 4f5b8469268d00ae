"""Memory, process and CPU limits by cgroup, v1 and v2. `Hierarchy.find` says which one this machine lets us write.

v1: /sys/fs/cgroup/<controller>/rl360/<run>/<sandbox> for memory, pids and cpu. v2: /sys/fs/cgroup/rl360/<run>/<sandbox>.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rl360.agents.sandbox.base import Limits

ROOT: Final = Path("/sys/fs/cgroup")
CONTROLLERS: Final = ("memory", "pids", "cpu")
WEAK_LIMITS: Final = (
    "cgroups are not writable here: sandboxes get per-process limits (ulimit) in place of memory, process and CPU limits of "
    "their own; run as root, or delegate a cgroup to this user, to have them"
)
_PERIOD: Final = 100_000  # microseconds of a CPU quota's period
_FOLDER: Final = "rl360"


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of one sandbox: one folder a controller in v1, one folder in v2."""

    folders: tuple[Path, ...]
    version: int

    @property
    def join_files(self) -> tuple[str, ...]:
        """A process that writes 0 to each of these is in, and so are its children."""
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    def pids(self) -> set[int]:
        """Processes inside."""
        found: set[int] = set()
        for folder in self.folders:
            try:
                found |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
            except FileNotFoundError:
                continue
        return found

    def oom_kills(self) -> int:
        """Processes that the memory limit has killed."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        for line in (self.folders[0] / name).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def kill(self, deadline: float) -> set[int]:
        """SIGKILL everything inside until nothing is left or `deadline` (monotonic seconds); returns what is left."""
        whole = self.folders[0] / "cgroup.kill"
        if whole.exists():
            whole.write_text("1")
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            time.sleep(0.002)
        return left

    def remove(self, deadline: float) -> None:
        """Remove the empty cgroup; the kernel may need a moment after the last process."""
        for folder in self.folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.005)


@dataclass(frozen=True)
class Hierarchy:
    """Where cgroups of runs can be made."""

    parents: tuple[Path, ...]
    version: int

    @classmethod
    def find(cls, root: Path = ROOT, own: str | None = None) -> Hierarchy | None:
        """The writable hierarchy of this machine, or None. `own` is this process's v2 path (default: asked of the kernel)."""
        if all((root / c / "cgroup.procs").exists() for c in CONTROLLERS):
            return _usable(cls(tuple(root / c / _FOLDER for c in CONTROLLERS), 1))
        if not (root / "cgroup.controllers").exists():
            return None
        mine = own if own is not None else _own_path()
        places = [root, root / mine.strip("/")]
        return next((h for place in places if (h := _usable(cls((place / _FOLDER,), 2)))), None)

    def create(self, run: str, name: str, limits: Limits) -> Cgroup:
        """Make a limited cgroup. Raises OSError."""
        folders = tuple(parent / run / name for parent in self.parents)
        for folder in folders:
            if self.version == 2:
                _delegate(folder.parent)
            folder.mkdir(parents=True)
        group = Cgroup(folders, self.version)
        for file, value in _settings(group, limits):
            file.write_text(value)
        return group

    def existing(self, run: str, name: str) -> Cgroup:
        """The cgroup of that name, there or not: for a sweep."""
        return Cgroup(tuple(parent / run / name for parent in self.parents), self.version)

    def remove_run(self, run: str) -> None:
        """Remove a run's own folder when its last sandbox is gone."""
        for parent in self.parents:
            try:
                (parent / run).rmdir()
            except OSError:
                continue  # another runner's sandboxes are in it


def _settings(group: Cgroup, limits: Limits) -> list[tuple[Path, str]]:
    size, quota = str((limits.memory_mb + limits.storage_mb) << 20), str(round(limits.cpus * _PERIOD))
    if group.version == 2:
        (only,) = group.folders
        swap = [(only / "memory.swap.max", "0")] if (only / "memory.swap.max").exists() else []
        return [(only / "memory.max", size), *swap, (only / "pids.max", str(limits.pids)), (only / "cpu.max", f"{quota} {_PERIOD}")]
    memory, pids, cpu = group.folders
    swap_v1 = memory / "memory.memsw.limit_in_bytes"
    return [
        (memory / "memory.limit_in_bytes", size),
        *([(swap_v1, size)] if swap_v1.exists() else []),
        (pids / "pids.max", str(limits.pids)),
        (cpu / "cpu.cfs_period_us", str(_PERIOD)),
        (cpu / "cpu.cfs_quota_us", quota),
    ]


def _delegate(folder: Path) -> None:
    """Give the children of `folder` and of its parent the controllers (v2)."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = " ".join(f"+{c}" for c in CONTROLLERS)
    for place in (folder.parent, folder):
        (place / "cgroup.subtree_control").write_text(wanted)


def _usable(hierarchy: Hierarchy) -> Hierarchy | None:
    """The hierarchy, when a limited cgroup can really be made in it."""
    probe = f"probe-{os.getpid()}-{time.monotonic_ns()}"
    try:
        if hierarchy.version == 2:
            _delegate(hierarchy.parents[0])
        group = hierarchy.create(probe, "x", Limits(memory_mb=64, storage_mb=1, pids=8, cpus=1.0))
        group.remove(time.monotonic() + 1.0)
        hierarchy.remove_run(probe)
    except OSError:
        return None
    return hierarchy


def _own_path() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    return "/"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def describe() -> str:
    """One line for `rl360 doctor`."""
    found = Hierarchy.find()
    return f"cgroup v{found.version}: {', '.join(CONTROLLERS)}" if found else WEAK_LIMITS
