"""A sandbox of namespaces: read-only system, no network, cleared environment, a uid of its own, cgroup limits."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from rl360.agents.outcomes import InfraError, boundary
from rl360.agents.sandbox.base import ExecResult, Limits, Sealed
from rl360.agents.sandbox.host import Host
from rl360.agents.sandbox.leases import Lease, remove_tree
from rl360.agents.sandbox.place import Place
from rl360.bus.events import Boundary, Cause

_FREE_BYTES: Final = 256 << 20
"""A sandbox isn't started with less left on the disk."""
_CLOSE_SECONDS: Final = 5.0
_LISTEN_SECONDS: Final = 10.0


class BwrapSandbox:
    """`files` is copied into the workdir. `read_only` are further folders that the agent sees {path inside: folder}."""

    def __init__(
        self,
        host: Host,
        lease: Lease,
        name: str,
        *,
        run: str,
        number: int,
        limits: Limits,
        workdir: str,
        files: Path | None,
        env: Mapping[str, str],
        start_timeout: float,
        read_only: Mapping[str, Path] | None = None,
    ) -> None:
        self.id = name
        self._host, self._lease, self._limits = host, lease, limits
        self._uid = host.uid_of(number)
        self._inside, self._files, self._env = workdir, files, env
        self._read_only = read_only or {}
        self._timeout = start_timeout
        self._run = run
        self._group = host.hierarchy.existing(run, f"{lease.name}.{name}") if host.hierarchy else None
        self.root = lease.folder / name
        self.workdir = self.root / "app"
        self._place: Place | None = None
        self._sealed: Place | None = None
        self._aborted = False
        self._dead_at: float | None = None

    def start(self) -> None:
        with boundary(Boundary.SANDBOX):
            end = time.monotonic() + self._timeout
            self._lease.open(self.id, self._group)
            self._refuse_full_disk()
            if self._host.hierarchy is not None:
                self._host.hierarchy.create(self._run, f"{self._lease.name}.{self.id}", self._limits)
            if self._files is None:
                self.workdir.mkdir()
            else:
                shutil.copytree(self._files, self.workdir, symlinks=True)
            self._own(self.workdir)
            self._place = self._new_place()
            self._place.start(self._read_only, {self._inside: self.workdir}, max(0.0, end - time.monotonic()))

    def exec(self, command: str, timeout: float, env: Mapping[str, str] | None = None) -> ExecResult:
        return self._started().exec([self._host.bash, "-c", command, "bash"], {**self._env, **(env or {})}, timeout)

    def listen(self) -> socket.socket:
        with boundary(Boundary.SANDBOX):
            return self._started().listen(_LISTEN_SECONDS)

    def kill_all(self) -> float:
        self._started().kill_all()
        self._dead_at = self._dead_at or time.time()
        return self._dead_at

    def run_sealed(self, run: Sealed, timeout: float) -> ExecResult:
        if self._dead_at is None:
            raise InfraError(Boundary.SANDBOX, Cause.UNKNOWN, "a sealed run before kill_all: something of the agent's may live")
        end = time.monotonic() + timeout
        for folder in run.writable.values():
            self._own(folder)
        self.workdir.chmod(self.workdir.stat().st_mode | 0o711)  # an agent may have closed it to everybody
        place = self._sealed = self._new_place()
        try:
            place.start(run.read_only, {self._inside: self.workdir, **run.writable}, timeout)
            result = place.exec(list(run.argv), run.env, max(0.0, end - time.monotonic()))
        except InfraError:
            with suppress(InfraError):  # the first cause stays
                place.kill_all()
            raise
        place.kill_all()
        return result

    def oom_kills(self) -> int:
        return self._group.oom_kills() if self._group else 0

    def abort(self) -> None:
        self._aborted = True
        for place in (self._place, self._sealed):
            if place is not None:
                place.kill_all()

    def close(self) -> None:
        with boundary(Boundary.SANDBOX):
            self.abort()
            deadline = time.monotonic() + _CLOSE_SECONDS
            if self._group is not None:
                self._group.kill(deadline)
                self._group.remove(deadline)
            remove_tree(self.root)

    def _started(self) -> Place:
        if self._place is None:
            raise InfraError(Boundary.SANDBOX, Cause.LOST, "the sandbox was not started")
        return self._place

    def _new_place(self) -> Place:
        if self._aborted:
            raise InfraError(Boundary.SANDBOX, Cause.CANCELLED, "the sandbox was killed by its runner")
        return Place(
            self._host,
            label=self._lease.label(self.id),
            uid=self._uid,
            limits=self._limits,
            group=self._group,
            cwd=self._inside,
            info=self.root / "bwrap.json",
        )

    def _own(self, folder: Path) -> None:
        """Give a folder to the sandbox's uid; where we aren't root, it has ours already."""
        if not self._host.rooted:
            return
        os.chown(folder, self._uid, self._uid)
        for parent, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.chown(os.path.join(parent, name), self._uid, self._uid, follow_symlinks=False)

    def _refuse_full_disk(self) -> None:
        disk = os.statvfs(self.root)
        if disk.f_bavail * disk.f_frsize < _FREE_BYTES:
            free = disk.f_bavail * disk.f_frsize >> 20
            raise InfraError(Boundary.SANDBOX, Cause.DISK_FULL, f"{free} MiB left on the disk of {self.root}; free some space")
