"""Real sandboxes for tests. Each test must leave no process, no cgroup and no folder behind."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl360.agents.sandbox.base import LABEL, Sandbox
from rl360.agents.sandbox.host import detect
from rl360.agents.sandbox.leases import Lease, labelled
from rl360.agents.sandbox.make import SandboxMaker
from rl360.agents.staging import Stage
from rl360.agents.tasks import Task
from rl360.config import Sandbox as SandboxSection

RUN = f"pytest{os.getpid()}"
"""Of this process: names of processes and cgroups are the machine's, and tests run side by side."""


class Sandboxes:
    """Makes sandboxes and takes them down again."""

    def __init__(self, root: Path) -> None:
        self.root = root / "sandboxes"
        self.lease = Lease(self.root, f"{RUN}-{root.name}")
        self.stage = Stage(self.lease.folder / "tasks")
        self.made: list[Sandbox] = []
        self._numbers = itertools.count()

    def make(self, task: Task, **section: object) -> Sandbox:
        """Unstarted."""
        maker = SandboxMaker(SandboxSection(**section), self.lease, RUN)  # type: ignore[arg-type]
        number = next(self._numbers)
        sandbox = maker.make(f"s{number}", number, task, self.stage.get(task), 10.0)
        self.made.append(sandbox)
        return sandbox

    def start(self, task: Task, **section: object) -> Sandbox:
        sandbox = self.make(task, **section)
        sandbox.start()
        return sandbox

    def left(self) -> list[int]:
        """Processes of these sandboxes."""
        return labelled(f"{LABEL}={self.lease.name}/".encode())


@pytest.fixture
def sandboxes(tmp_path: Path) -> Iterator[Sandboxes]:
    made = Sandboxes(tmp_path)
    yield made
    for sandbox in made.made:
        sandbox.close()
    assert made.left() == []
    made.lease.release()
    if hierarchy := detect().hierarchy:
        hierarchy.remove_run(RUN)
    assert list(made.root.iterdir()) == []
