"""`compose/compose.yaml` as it stands, on stand-ins for images that come from a registry: a run that is scaled and struck as it goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import Daemon

ROOT = Path(__file__).parents[2]
FILE = ROOT / "compose" / "compose.yaml"
STANDIN = Path(__file__).with_name("python_image.sh")
RECIPE = {"RECIPE": "recipes/chaos.toml", "SET": "--set run.steps=4"}


class Compose:
    """The project on one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        beside = Path(sys.executable).with_name("docker-compose")
        self._command = [str(beside)] if beside.exists() else [shutil.which("docker") or "docker", "compose"]
        self._env = {**os.environ, **RECIPE, "DOCKER_HOST": daemon.address, "DOCKER_BUILDKIT": "0"}

    def __call__(self, *arguments: str, seconds: float = 180) -> str:
        """Output of one command. Raises AssertionError with what it said when it fails."""
        argv = [*self._command, "-p", "rl360test", "-f", str(FILE), *arguments]
        done = subprocess.run(
            argv, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-4000:]}"
        return done.stdout

    def until(self, service: str, *says: str, seconds: float = 120) -> str:
        """Follow a service's log until a line has all of this."""
        argv = [*self._command, "-p", "rl360test", "-f", str(FILE), "logs", "--follow", "--no-log-prefix", service]
        follow = subprocess.Popen(argv, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        end = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
        assert follow.stdout is not None
        seen: list[str] = []
        try:
            for line in follow.stdout:
                seen.append(line)
                if all(part in line for part in says):
                    return line
                assert end.poll() is None, f"no line with {says} within {seconds:g} s: {''.join(seen[-20:])}"
        finally:
            for process in (follow, end):
                process.kill()
                process.wait()
            follow.stdout.close()
        raise AssertionError(f"{service} ended without a line with {says}: {''.join(seen[-20:])}")


@pytest.fixture
def compose(daemon: Daemon) -> Iterator[Compose]:
    env = {**os.environ, "DOCKER_HOST": daemon.address, "DOCKER_BUILDKIT": "0"}
    subprocess.run([str(STANDIN), sys.prefix, "standin:python"], env=env, check=True, capture_output=True, timeout=300)
    for target in ("node", "model"):
        argv = ["docker", "build", "--quiet", "--network", "host", "--file", str(FILE.with_name("Dockerfile")), "--target", target]
        argv += ["--build-arg", "BASE=standin:python", "--tag", f"rl360-{target}", str(ROOT)]
        subprocess.run(argv, env=env, check=True, capture_output=True, timeout=300)
    made = Compose(daemon)
    yield made
    made("down", "--volumes", "--timeout", "5")


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_in_containers_is_scaled_and_struck_and_loses_nothing(compose: Compose) -> None:
    compose("up", "--detach", "--no-build")
    compose.until("lead", "step   0")
    compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "runner=3", "runner")
    compose("restart", "--timeout", "5", "nats")
    compose.until("lead", "step   1")
    compose("kill", "--signal", "KILL", "runner")
    compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "runner=2", "runner")
    compose.until("lead", "audit it:")
    assert "clean: every rule holds" in compose("run", "--rm", "--no-deps", "lead", "audit", "/run/rl360/run")
    events = compose(
        "run", "--rm", "--no-deps", "lead", "journal", "tail", "/run/rl360/run", "--type", "VerifierResult", "--json", "--lines", "200"
    )
    assert events.count('"VerifierResult"') == 4 * 32
