"""Who owns which sandbox, so that nothing of a dead runner stays (CASES 39, 40).

<dir>/sandboxes/<lease>.lease   locked by its runner for as long as it lives; the kernel lets go of it when it dies
<dir>/sandboxes/<lease>/<sandbox>/intent.json   written before anything of the sandbox is started
A sweep takes every lease that isn't locked, kills what its intents name, and removes the folders.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from rl360.agents.sandbox.base import LABEL
from rl360.agents.sandbox.cgroups import Cgroup

log = logging.getLogger(__name__)

_SUFFIX: Final = ".lease"
_NEW: Final = ".new"
_KILL_SECONDS: Final = 10.0


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that is about to start: whose it is, and where its traces will be."""

    sandbox: str
    lease: str
    root: str
    created: float
    cgroup: tuple[str, ...] = ()
    cgroup_version: int = 0
    engine: str = ""  # address of the Docker daemon that has its containers


class Lease:
    """A runner's lock and the folder of its sandboxes. Ends with `release`, or with the process."""

    def __init__(self, root: Path, name: str) -> None:
        """Take it. `name` must be new: a lease is never taken over."""
        self.name = name
        self.folder = root / name
        self._file = root / f"{name}{_SUFFIX}"
        root.mkdir(parents=True, exist_ok=True)
        aside = root / f".{name}{_NEW}"
        self._fd = _locked(aside)
        try:
            self.folder.mkdir(mode=0o700)
            os.rename(aside, self._file)  # a lease that can be seen is locked already
        except OSError:
            aside.unlink()
            os.close(self._fd)
            raise

    def open(self, sandbox: str, group: Cgroup | None, *, engine: str = "") -> Path:
        """Record the intent of a sandbox and return its folder, before anything else of it exists."""
        folder = self.folder / sandbox
        folder.mkdir()
        intent = Intent(
            sandbox=sandbox,
            lease=self.name,
            root=str(folder),
            created=time.time(),
            cgroup=tuple(map(str, group.folders)) if group else (),
            cgroup_version=group.version if group else 0,
            engine=engine,
        )
        (folder / "intent.json").write_bytes(msgspec.json.encode(intent))
        return folder

    def label(self, sandbox: str) -> str:
        return f"{self.name}/{sandbox}"

    def release(self) -> None:
        """Give it back; its sandboxes must be closed. A second call does nothing.

        One whose containers could not be removed leaves its intent to the next sweep, which finds nobody holding it.
        """
        if self._fd >= 0:
            if not any(intent.engine for intent in _intents(self.folder)):
                remove_tree(self.folder)
                self._file.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def sweep(root: Path) -> tuple[str, ...]:
    """Kill and remove every sandbox whose runner is dead; returns their names. Runners at work are left alone.

    Raises OSError, after all others are swept, for a lease that can't be now; it stays for the next sweep.
    """
    swept: list[str] = []
    failed: OSError | None = None
    for file in sorted((*root.glob(f"*{_SUFFIX}"), *root.glob(f".*{_NEW}"))):
        try:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # given back, or renamed, a moment ago
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            try:
                swept += _sweep_lease(root, file.name.removeprefix(".").removesuffix(_SUFFIX).removesuffix(_NEW))
                file.unlink(missing_ok=True)
            except OSError as e:
                failed = failed or e
        finally:
            os.close(fd)
    if failed is not None:
        raise failed
    return tuple(swept)


def _sweep_lease(root: Path, lease: str) -> list[str]:
    folder = root / lease
    if not folder.is_dir():
        return []
    intents = _intents(folder)
    deadline = time.monotonic() + _KILL_SECONDS
    for pid in labelled(f"{LABEL}={lease}/".encode()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for intent in intents:
        log.info("sweep: sandbox %s of dead runner %s", intent.sandbox, lease)
        group = Cgroup(tuple(map(Path, intent.cgroup)), intent.cgroup_version)
        if intent.cgroup and any(f.exists() for f in group.folders):
            group.kill(deadline)
            group.remove(deadline)
    _sweep_containers(lease, intents)
    remove_tree(folder)
    return [i.sandbox for i in intents]


def _sweep_containers(lease: str, intents: Sequence[Intent]) -> None:
    for engine in {i.engine for i in intents if i.engine}:
        from rl360.agents.sandbox.docker.engine import sweep_lease  # only where a Docker daemon is used

        sweep_lease(engine, lease, {i.sandbox: i.created for i in intents if i.engine == engine})


def _intents(folder: Path) -> list[Intent]:
    return [i for path in sorted(folder.iterdir()) if (i := _intent(path / "intent.json"))]


def _locked(path: Path) -> int:
    """Descriptor of a new file that is ours alone; made again when a sweep took it before it was locked."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _intent(path: Path) -> Intent | None:
    """The intent, or None where the runner died before it was written: nothing was started then."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Intent)
    except (OSError, msgspec.DecodeError):
        return None


def labelled(label: bytes) -> list[int]:
    """Processes whose environment has the label: first processes of sandboxes, and in plain sandboxes every process."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if label in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def remove_tree(folder: Path) -> None:
    """Remove a folder whatever an agent made of it: no permissions, thousands of levels, odd names. Follows no link."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        _remove_flattened(folder)


def _remove_flattened(folder: Path) -> None:
    """Lift every folder to the top before it is emptied: no path gets long, and no recursion is needed."""
    folder.chmod(0o700)
    lifted = 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for below in list(os.scandir(entry.path)):
                if below.is_dir(follow_symlinks=False):
                    os.chmod(below.path, 0o700)
                    lifted += 1
                    os.rename(below.path, folder / f".lifted-{lifted}-{time.monotonic_ns()}")
                else:
                    os.unlink(below.path)
            os.rmdir(entry.path)
    folder.rmdir()
