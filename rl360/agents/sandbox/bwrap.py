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

from rl360.agents.network import NO_WORD, Network, proxy_env
from rl360.agents.outcomes import InfraError, boundary
from rl360.agents.sandbox.base import ExecResult, Limits, Sealed
from rl360.agents.sandbox.disk import Disk
from rl360.agents.sandbox.egress import Egress
from rl360.agents.sandbox.host import Host
from rl360.agents.sandbox.leases import Lease, remove_tree
from rl360.agents.sandbox.place import Place
from rl360.bus.events import Boundary, Cause

_LOGS_PART: Final = 16
"""The verifier's folder may take one part in so many of the memory limit: a full workdir must leave it room for a reward."""
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
        files_size: int,
        env: Mapping[str, str],
        start_timeout: float,
        read_only: Mapping[str, Path] | None = None,
        network: Network = NO_WORD,
        verifier_network: Network = NO_WORD,
    ) -> None:
        self.id = name
        self._host, self._lease, self._limits = host, lease, limits
        self._uid = host.uid_of(number)
        self._inside, self._files, self._files_size, self._env = workdir, files, files_size, env
        self._read_only = read_only or {}
        self._network, self._verifier_network = network, verifier_network
        self._egresses: list[Egress] = []
        self._timeout = start_timeout
        self._run = run
        self._group = host.hierarchy.existing(run, f"{lease.name}.{name}") if host.hierarchy else None
        self.root = self._folder = lease.folder / name
        self.workdir = self.root / "app"
        self._disk: Disk | None = None
        self._place: Place | None = None
        self._sealed: Place | None = None
        self._aborted = False
        self._dead_at: float | None = None

    def start(self) -> None:
        with boundary(Boundary.SANDBOX):
            end = time.monotonic() + self._timeout
            self._lease.open(self.id, self._group)
            if self._host.hierarchy is not None:
                self._host.hierarchy.create(self._run, f"{self._lease.name}.{self.id}", self._limits)
            self._mount(max(0.0, end - time.monotonic()))
            if self._files is not None:
                shutil.copytree(self._files, self.workdir, symlinks=True, dirs_exist_ok=True)
            self._own(self.workdir)
            self._place = self._new_place()
            self._place.start(self._read_only, {self._inside: self.workdir}, max(0.0, end - time.monotonic()))
            self._env = {**self._env, **self._open(self._place, self._network)}

    def exec(self, command: str, timeout: float, env: Mapping[str, str] | None = None) -> ExecResult:
        return self._started().exec([self._host.bash, "-c", command, "bash"], {**self._env, **(env or {})}, timeout)

    def listen(self) -> socket.socket:
        with boundary(Boundary.SANDBOX):
            return self._started().listen(_LISTEN_SECONDS)

    def kill_commands(self) -> None:
        self._started().kill_commands()

    def kill_all(self) -> float:
        self._started().kill_all()
        self._close_egresses()
        self._dead_at = self._dead_at or time.time()
        self.workdir.chmod(self.workdir.stat().st_mode | 0o711)  # an agent may have closed it to everybody
        return self._dead_at

    def run_sealed(self, run: Sealed, timeout: float) -> ExecResult:
        if self._dead_at is None:
            raise InfraError(Boundary.SANDBOX, Cause.UNKNOWN, "a sealed run before kill_all: something of the agent's may live")
        end = time.monotonic() + timeout
        for folder in run.writable.values():
            self._own(folder)
        place = self._sealed = self._new_place()
        try:
            place.start(run.read_only, {self._inside: self.workdir, **run.writable}, timeout)
            env = {**run.env, **self._open(place, self._verifier_network)}
            result = place.exec(list(run.argv), env, max(0.0, end - time.monotonic()))
        except InfraError:
            with suppress(InfraError):  # the first cause stays
                place.kill_all()
            raise
        finally:
            self._close_egresses()
        place.kill_all()
        return result

    def oom_kills(self) -> int:
        return self._group.oom_kills() if self._group else 0

    def abort(self) -> None:
        self._aborted = True
        for place in (self._place, self._sealed):
            if place is not None:
                place.kill_all()
        self._close_egresses()

    def close(self) -> None:
        with boundary(Boundary.SANDBOX):
            self.abort()
            deadline = time.monotonic() + _CLOSE_SECONDS
            if self._group is not None:
                self._group.kill(deadline)
                self._group.remove(deadline)
            if self._disk is not None:
                self._disk.close()
            remove_tree(self._folder)

    def _open(self, place: Place, network: Network) -> dict[str, str]:
        """Let a place reach the hosts of its allowlist, before anything runs in it; the variables that say how."""
        if not network.filtered:
            return {}
        with boundary(Boundary.SANDBOX):
            listener = place.listen(_LISTEN_SECONDS)
        self._egresses.append(Egress(listener, network.allowed, self.id))
        return proxy_env(listener.getsockname()[1])

    def _close_egresses(self) -> None:
        while self._egresses:
            self._egresses.pop().close()

    def _mount(self, timeout: float) -> None:
        size, beside = self._files_size + (self._limits.storage_mb << 20), (self._limits.memory_mb << 20) // _LOGS_PART
        self._disk = Disk(self._host, self._folder, size=size, beside=beside, timeout=timeout)
        self.root = self._disk.root
        self.workdir = self.root / "app"

    def _started(self) -> Place:
        if self._place is None:
            raise InfraError(Boundary.SANDBOX, Cause.LOST, "the sandbox was not started")
        return self._place

    def _new_place(self) -> Place:
        if self._aborted or self._disk is None:
            raise InfraError(Boundary.SANDBOX, Cause.CANCELLED, "the sandbox was killed by its runner")
        return Place(
            self._host,
            label=self._lease.label(self.id),
            uid=self._uid,
            limits=self._limits,
            group=self._group,
            cwd=self._inside,
            info=self._folder / "bwrap.json",
            disk=self._disk,
        )

    def _own(self, folder: Path) -> None:
        """Give a folder to the sandbox's uid; where we aren't root, it has ours already."""
        if not self._host.rooted:
            return
        os.chown(folder, self._uid, self._uid)
        for parent, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.chown(os.path.join(parent, name), self._uid, self._uid, follow_symlinks=False)
