"""Sandboxes of the kind that the recipe names, with the smaller of the task's and the recipe's limits."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rl360.agents.sandbox.base import Limits, Sandbox
from rl360.agents.sandbox.bwrap import BwrapSandbox
from rl360.agents.sandbox.cgroups import WEAK_LIMITS
from rl360.agents.sandbox.host import detect
from rl360.agents.sandbox.leases import Lease
from rl360.agents.sandbox.subprocess import SubprocessSandbox
from rl360.agents.staging import Staged
from rl360.agents.tasks import Task
from rl360.config import Sandbox as SandboxSection

if TYPE_CHECKING:
    from rl360.agents.sandbox.docker.make import DockerMaker

log = logging.getLogger(__name__)

NO_LIMITS: Final = (
    'sandbox.kind = "subprocess": agents run as this user, with this machine\'s files and network in reach and no limits; '
    'set sandbox.kind = "bwrap"'
)


class SandboxMaker:
    """Makes the sandboxes of one lease, unstarted. Raises InfraError when this machine can't run the kind asked for."""

    def __init__(self, section: SandboxSection, lease: Lease, run: str) -> None:
        self._section, self._lease, self._run = section, lease, run
        self._host = detect() if section.kind == "bwrap" else None
        self._docker = _docker_maker(section.image, lease, run) if section.kind == "docker" else None
        if section.kind == "subprocess":
            log.warning("%s", NO_LIMITS)

    def make(
        self, name: str, number: int, task: Task, staged: Staged, timeout: float, read_only: Mapping[str, Path] | None = None
    ) -> Sandbox:
        """A sandbox for one attempt. `name` is new in the lease, `number` counts sandboxes, `timeout` is for its start."""
        if self._docker is not None:
            return self._docker.make(name, task, staged, self.limits(task), timeout, read_only)
        if self._host is None:
            return SubprocessSandbox(self._lease, name, workdir=task.workdir, files=staged.environment, env=task.env, read_only=read_only)
        return BwrapSandbox(
            self._host,
            self._lease,
            name,
            run=self._run,
            number=number,
            limits=self.limits(task),
            workdir=task.workdir,
            files=staged.environment,
            files_size=staged.size,
            env=task.env,
            start_timeout=timeout,
            read_only=read_only,
            network=task.network,
            verifier_network=task.verifier_network,
        )

    def unenforced(self) -> dict[str, str]:
        """Limits that this machine can't enforce: what, and why with the remedy."""
        if self._docker is not None:
            return self._docker.unenforced()
        if self._host is None:
            return {"all": NO_LIMITS}
        return {} if self._host.hierarchy else {"memory, processes, cpu": WEAK_LIMITS}

    def close(self) -> None:
        """Remove what the sandboxes of this run shared on the machine, when no other runner uses it."""
        if self._docker is not None:
            self._docker.close()
        if self._host is not None and self._host.hierarchy is not None:
            self._host.hierarchy.remove_run(self._run)

    def limits(self, task: Task) -> Limits:
        """The smaller of the task's and the recipe's."""
        return Limits(
            memory_mb=min(self._section.memory_mb, task.memory_mb or self._section.memory_mb),
            storage_mb=min(self._section.storage_mb, task.storage_mb or self._section.storage_mb),
            pids=self._section.pids,
            cpus=min(self._section.cpus, task.cpus or math.inf),
        )


def _docker_maker(image: str, lease: Lease, run: str) -> DockerMaker:
    from rl360.agents.sandbox.docker.make import DockerMaker  # its SDK takes 0.2 s to load

    return DockerMaker(image, lease, run)
