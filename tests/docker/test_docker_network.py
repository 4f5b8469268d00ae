"""An allowlist in a container: no network but the runner's proxy, for the agent and for its verifier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl360.agents.tasks import Task
from tests.agents.conftest import Sandboxes
from tests.agents.harbor import make_task
from tests.agents.test_egress import INSIDE
from tests.docker.daemon import BASE, Daemon
from tests.docker.test_docker_sandbox import judged

pytestmark = pytest.mark.docker

HOST = "11.22.33.44"
"""Of a container that stands for a host of the internet: on a bridge of this machine, and not this machine's own."""
TASK = f"[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['{HOST}', '11.22.33.1']\n"
GET = f"""
import os, urllib.request
print(urllib.request.urlopen("http://{HOST}/motd", timeout=10).read().decode().strip())
"""
TEST = """python3 /app/get.py > got && [ -z "$RL360_SANDBOX" ] && grep -c "good morning" got > /logs/verifier/reward.txt
"""


@pytest.fixture
def host(daemon: Daemon) -> Iterator[None]:
    daemon.call("network", "create", "--subnet", "11.22.33.0/24", "internet")
    serve = "mkdir /w; cd /w; echo good morning > motd; exec python3 -m http.server 80"
    made = daemon.call("run", "-d", "--name", "host", "--network", "internet", "--ip", HOST, BASE, "bash", "-c", serve)
    assert made.returncode == 0, made.stderr
    yield
    daemon.call("rm", "-f", "host")
    daemon.call("network", "rm", "internet")


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "t", test=TEST, files={"agent.py": INSIDE, "get.py": GET}, toml=TASK)


def test_a_listed_host_is_reached_by_agent_and_verifier_and_nothing_else_is(sandboxes: Sandboxes, task: Task, host: None) -> None:
    sandbox = sandboxes.start(task)
    wait = "for n in $(seq 50); do python3 get.py 2>/dev/null && break; sleep 0.1; done"
    assert sandbox.exec(wait, 20).output == "good morning\n"
    assert sandbox.exec("python3 agent.py; grep -c : /proc/net/dev", 20).output.splitlines()[1:] == [
        "403 bad.test is not in the task's allowed_hosts; add it to task.toml if the task needs it",
        "1",
    ]
    said = sandbox.exec("exec 3<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT 11.22.33.1:22 HTTP/1.1\\r\\n\\r\\n' >&3; cat <&3", 10).output
    assert "11.22.33.1 leads to this machine or a private network" in said
    assert sandbox.exec(f"exec 3<>/dev/tcp/{HOST}/80", 10).status != 0
    assert judged(sandboxes, sandbox, task) == 1.0
