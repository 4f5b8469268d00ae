"""Docker sandboxes of one lease: one daemon, one set of images, and what could not be removed yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import Limits
from rl360.agents.sandbox.docker.bounded import UNBOUNDED, unbounded
from rl360.agents.sandbox.docker.engine import Engine, address
from rl360.agents.sandbox.docker.images import BUILD_SECONDS, Images, Source
from rl360.agents.sandbox.docker.sandbox import DockerSandbox
from rl360.agents.sandbox.leases import Lease
from rl360.agents.staging import Staged
from rl360.agents.tasks import Task
from rl360.bus.events import Boundary, Cause


class DockerMaker:
    """`image` is the recipe's `sandbox.image`. Raises MissingExtra without the SDK, NoDaemon when no daemon answers."""

    def __init__(self, image: str, lease: Lease, run: str) -> None:
        self._image, self._lease, self._run = image, lease, run
        self._engine = Engine(address())
        self._images = Images(self._engine, lease.folder.parent.parent / "images")

    def make(
        self, name: str, task: Task, staged: Staged, limits: Limits, timeout: float, read_only: Mapping[str, Path] | None
    ) -> DockerSandbox:
        """Unstarted. Raises InfraError (bad_task) for a task that names no image where the recipe names none."""
        source = self._source(task, staged)
        return DockerSandbox(
            self._engine,
            self._images,
            self._lease,
            name,
            run=self._run,
            limits=limits,
            task=task,
            source=source,
            files=staged.environment if not task.docker_image and source.context is None else None,
            start_timeout=timeout,
            read_only=read_only,
        )

    def unenforced(self) -> dict[str, str]:
        """Limits that containers go without, and why."""
        why = unbounded(self._engine)
        return {"disk": UNBOUNDED % why} if why else {}

    def close(self) -> None:
        """End what is still being pulled or built for us."""
        self._images.close()

    def _source(self, task: Task, staged: Staged) -> Source:
        seconds = task.build_timeout or BUILD_SECONDS
        if task.docker_image:
            return Source(reference=task.docker_image, seconds=seconds)
        if staged.image is not None:
            return Source(context=staged.image, seconds=seconds)
        if self._image:
            return Source(reference=self._image, seconds=seconds)
        why = f"task {task.name!r} has neither environment.docker_image nor environment/Dockerfile; give it one, or set sandbox.image"
        raise InfraError(Boundary.SANDBOX, Cause.BAD_TASK, why)
