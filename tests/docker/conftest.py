"""One daemon for the session, sandboxes on it for each test. Each test must leave no container, no volume and no process."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl360.agents.sandbox.base import Sandbox
from rl360.agents.tasks import Task
from tests.agents.conftest import Sandboxes
from tests.docker.daemon import Daemon, missing


class DockerSandboxes(Sandboxes):
    """Sandboxes of kind "docker", unless a test names another."""

    def make(self, task: Task, **section: object) -> Sandbox:
        return super().make(task, **{"kind": "docker", **section})


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    if importlib.util.find_spec("docker") is None:
        pytest.skip("the docker SDK is not installed: pip install 'rl360[docker]'")
    if why := missing():
        pytest.skip(f"no Docker daemon: {why}")
    made = Daemon(Path(tempfile.mkdtemp(prefix="rl360-docker-")))  # a short path: it holds sockets
    before = os.environ.get("DOCKER_HOST")
    try:
        try:
            made.start()
        except RuntimeError as e:
            pytest.skip(f"dockerd does not start here: {str(e)[-300:]}")
        made.make_base()
        os.environ["DOCKER_HOST"] = made.address
        yield made
    finally:
        os.environ.pop("DOCKER_HOST", None)
        if before is not None:
            os.environ["DOCKER_HOST"] = before
        made.stop()


@pytest.fixture
def sandboxes(tmp_path: Path, daemon: Daemon) -> Iterator[Sandboxes]:
    made = DockerSandboxes(tmp_path)
    yield made
    for sandbox in made.made:
        sandbox.close()
    assert made.left() == []
    for kind in (("ps", "-aq"), ("volume", "ls", "-q")):
        assert daemon.call(*kind, "--filter", f"label=rl360.lease={made.lease.name}").stdout == ""
    made.lease.release()
    assert list(made.root.iterdir()) == []
