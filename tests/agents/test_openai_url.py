"""An external agent: a command inside the sandbox whose only network is its session's URL."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest

from rl360.agents.harness import gate
from rl360.agents.harness.base import Assignment
from rl360.agents.harness.openai_url import OpenAiUrl
from rl360.agents.outcomes import InfraError
from rl360.agents.tasks import Task
from rl360.bus.events import AgentEnd, Boundary
from rl360.config import Agent
from tests.agents.conftest import Sandboxes
from tests.agents.fake_session import FakeSession, call, text
from tests.agents.harbor import make_task

pytestmark = pytest.mark.skipif(shutil.which("python3", path="/usr/bin") is None, reason="the agent of these tests is a python3 script")

AGENT = """
import json, os, subprocess, sys, urllib.request
def ask(path, body=None):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    data = json.dumps(body).encode() if body else None
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=20))
messages = [{"role": "user", "content": os.environ["RL360_INSTRUCTION"]}]
for turn in range(int(sys.argv[1])):
    message = ask("/chat/completions", {"model": "policy", "messages": messages})["choices"][0]["message"]
    messages.append(message)
    for tool in message.get("tool_calls") or []:
        subprocess.run(json.loads(tool["function"]["arguments"])["command"], shell=True)
"""


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task", files={"agent.py": AGENT})


async def act(sandboxes: Sandboxes, task: Task, session: FakeSession, command: str, *, seconds: float = 20.0, **config: object) -> AgentEnd:
    sandbox = sandboxes.start(task)
    given = Assignment(
        task=task,
        staged=sandboxes.stage.get(task),
        sandbox=sandbox,
        config=Agent(harness="openai_url", command=command, **config),  # type: ignore[arg-type]
        session="t0-g000-a0.1",
        base_url=session.base_url(),
        key="key",
        deadline=time.time() + seconds,
        traceparent="00-1-2-01",
        scratch=sandbox.root,
    )
    return await asyncio.wait_for(asyncio.to_thread(OpenAiUrl(given).run), 30)


async def test_it_solves_a_task_through_its_sessions_url_alone(sandboxes: Sandboxes, task: Task) -> None:
    async with FakeSession(lambda _: call("echo 42 > answer.txt")) as session:
        assert await act(sandboxes, task, session, "python3 agent.py 1") is AgentEnd.SUBMITTED
        (request,) = session.requests
        assert (request["authorization"], request["traceparent"]) == ("Bearer key", "00-1-2-01")
        assert request["messages"] == [{"role": "user", "content": "Write 42 to answer.txt"}]
    assert (sandboxes.made[0].workdir / "answer.txt").read_text() == "42\n"


async def test_no_other_path_and_no_other_host_is_in_reach(sandboxes: Sandboxes, task: Task) -> None:
    script = """
import os, socket, urllib.error, urllib.request
base = os.environ["OPENAI_BASE_URL"]
for path in ("/../../sessions", "/embeddings", "/chat/completions/..%2f..%2f..%2fsessions"):
    try:
        urllib.request.urlopen(base + path, b"{}", timeout=5)
        raise SystemExit(path)
    except urllib.error.HTTPError as e:
        assert e.code == 404, (path, e.code)
assert b"policy" in urllib.request.urlopen(base + "/models", timeout=5).read()
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=2)
    raise SystemExit("the host's port")
except OSError:
    pass
"""
    async with FakeSession(lambda _: text("x")) as session:
        (task.dir / "environment/probe.py").write_text(script.replace("{port}", str(session.port)))
        probing = make_task(task.dir, files={"probe.py": script.replace("{port}", str(session.port))})
        assert await act(sandboxes, probing, session, "python3 probe.py >out 2>&1") is AgentEnd.SUBMITTED, (
            sandboxes.made[0].workdir / "out"
        ).read_text()


async def test_an_agent_that_fails_by_itself_is_still_judged(sandboxes: Sandboxes, task: Task) -> None:
    async with FakeSession(lambda _: text("x")) as session:
        assert await act(sandboxes, task, session, "exit 3") is AgentEnd.ERROR


async def test_s15_it_is_killed_at_its_deadline(sandboxes: Sandboxes, task: Task) -> None:
    async with FakeSession(lambda _: text("x")) as session:
        assert await act(sandboxes, task, session, "sleep 60", seconds=0.5) is AgentEnd.TIMEOUT


async def test_s7_the_sessions_end_is_the_agents_end(sandboxes: Sandboxes, task: Task) -> None:
    async with FakeSession(lambda _: text("x")) as session:
        session.trouble = [{"status": 404, "code": "session_ended", "reason": "length", "message": "session_ended: length"}]
        assert await act(sandboxes, task, session, "python3 agent.py 3 2>/dev/null") is AgentEnd.LENGTH


async def test_it_gets_no_more_turns_than_the_recipe_gives(sandboxes: Sandboxes, task: Task) -> None:
    async with FakeSession(lambda _: text("x")) as session:
        assert await act(sandboxes, task, session, "python3 agent.py 9 2>/dev/null", max_turns=3) is AgentEnd.TURNS
        assert len(session.requests) == 3


FLOOD = """
import os, socket, sys, threading, time
sys.path.insert(0, "/app")
place = ("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0]))
head = b"POST /v1/%s HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n"
held, end = [], time.time() + 2
def hold(data):
    while time.time() < end:
        try:
            held.append(socket.create_connection(place, timeout=0.1))
            held[-1].sendall(data)
        except OSError:
            pass
def churn(path):
    while time.time() < end:
        try:
            with socket.create_connection(place, timeout=0.1) as link:
                link.sendall(b"GET /v1/" + path + b" HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
                link.recv(4096)
        except OSError:
            pass
half = head % (b"models", 30_000_000) + bytes(20_000_000)
for work in ((hold, b""), (hold, half), (churn, b"models"), (churn, b"embeddings")):
    threading.Thread(target=work[0], args=(work[1],), daemon=True).start()
time.sleep(2.2)
for link in held:
    link.close()
print(len(held), file=open("held", "w"))
os.execvp("python3", ["python3", "agent.py", "1"])
"""


def in_use() -> tuple[int, int]:
    """Descriptors and MiB of this process."""
    return len(os.listdir("/proc/self/fd")), int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


async def watch(seen: list[tuple[int, int]]) -> None:
    while True:
        seen.append(in_use())
        await asyncio.sleep(0.02)


async def test_a_flood_of_connections_and_bodies_takes_little_of_the_runner(sandboxes: Sandboxes, task: Task) -> None:
    """Hundreds of connections, bodies that never end, the same question again and again: a few are held, one is passed on."""
    flooding = make_task(task.dir, files={"flood.py": FLOOD, "agent.py": AGENT})
    seen = [in_use()]
    async with FakeSession(lambda _: call("echo 42 > answer.txt")) as session:
        watching = asyncio.create_task(watch(seen))
        assert await act(sandboxes, flooding, session, "python3 flood.py") is AgentEnd.SUBMITTED
        watching.cancel()
    assert (sandboxes.made[0].workdir / "answer.txt").read_text() == "42\n"
    assert int((sandboxes.made[0].workdir / "held").read_text()) > 2 * gate.CONNECTIONS
    descriptors, mib = (max(x) - first for x, first in zip(zip(*seen, strict=True), seen[0], strict=True))
    assert descriptors < gate.CONNECTIONS + 30
    assert mib < 300
    assert session.lists <= 1


HANGS_UP = """
import os, socket, time
place = ("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0]))
body = b'{"model": "policy", "messages": []}' + b" " * 3_000_000
with socket.create_connection(place) as link:
    link.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
time.sleep(0.5)
"""


async def test_s14_an_agent_that_hangs_up_on_its_answer_is_no_failure_of_the_session(sandboxes: Sandboxes, task: Task) -> None:
    rude = make_task(task.dir, files={"rude.py": HANGS_UP})
    async with FakeSession(lambda _: text("x" * 1_000_000)) as session:
        assert await act(sandboxes, rude, session, "python3 rude.py; exit 3") is AgentEnd.ERROR
        assert len(session.requests) == 1


async def test_s13_a_session_that_stays_away_is_no_failure_of_the_agents(sandboxes: Sandboxes, task: Task) -> None:
    async with FakeSession(lambda _: text("x")) as session:
        session.trouble = [{"status": 503, "message": "away"}] * 50
        with pytest.raises(InfraError) as caught:
            await act(sandboxes, task, session, "python3 agent.py 1 2>/dev/null", seconds=2.0)
        assert caught.value.boundary is Boundary.SESSION
