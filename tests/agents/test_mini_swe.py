"""mini-swe-agent with our model class: what it sends, what it sees, how it ends, and that it never waits past its deadline."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rl360.agents.harness.base import Assignment, Harness
from rl360.agents.harness.mini_swe import BAD_CALL, MiniSwe, observation
from rl360.agents.harness.scripted import Scripted
from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import ExecResult, Sandbox
from rl360.agents.tasks import Task
from rl360.bus.events import AgentEnd, Boundary, Cause
from rl360.config import Agent
from tests.agents.conftest import Sandboxes
from tests.agents.fake_session import SUBMIT, FakeSession, call, text, turns
from tests.agents.harbor import make_task

Give = Callable[..., Assignment]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task")


@pytest.fixture
def sandbox(sandboxes: Sandboxes, task: Task) -> Sandbox:
    return sandboxes.start(task)


@pytest.fixture
async def session() -> AsyncIterator[FakeSession]:
    async with FakeSession(turns(call("cat notes.txt"), call("echo 42 > answer.txt"), SUBMIT)) as server:
        yield server


@pytest.fixture
def given(session: FakeSession, sandboxes: Sandboxes, sandbox: Sandbox, task: Task, tmp_path: Path) -> Give:
    def make(seconds: float = 20.0, **config: object) -> Assignment:
        return Assignment(
            task=task,
            staged=sandboxes.stage.get(task),
            sandbox=sandbox,
            config=Agent(**config),  # type: ignore[arg-type]
            session="t0-g000-a0.1",
            base_url=session.base_url(),
            key="key",
            deadline=time.time() + seconds,
            traceparent="00-1-2-01",
            scratch=tmp_path,
        )

    return make


async def run(harness: Harness) -> AgentEnd:
    return await asyncio.wait_for(asyncio.to_thread(harness.run), 30)


async def test_a_solved_task_from_the_first_message_to_the_submission(session: FakeSession, sandbox: Sandbox, given: Give) -> None:
    assert await run(MiniSwe(given())) is AgentEnd.SUBMITTED
    assert (sandbox.workdir / "answer.txt").read_text() == "42\n"
    first, second, third = session.requests
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert first["messages"][0]["content"] == Agent().system
    assert first["messages"][1]["content"] == "Write 42 to answer.txt"
    assert [t["function"]["name"] for t in first["tools"]] == ["bash"]
    assert second["messages"][2] == {k: v for k, v in call("cat notes.txt").items() if v is not None} | {"content": ""}
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "hello"}
    assert third["messages"][5]["content"] == "(no output)"
    assert len({r["x-request-id"] for r in session.requests}) == 3
    assert {r["authorization"] for r in session.requests} == {"Bearer key"}
    assert {r["traceparent"] for r in session.requests} == {"00-1-2-01"}


@pytest.mark.parametrize(
    "malformed",
    [
        text('<tool_call>\n{"name": "bash"'),
        text("done."),
        call("x", name="shell"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": "{"}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": "[]"}}],
        },
    ],
)
async def test_a_malformed_reply_stays_in_the_history_with_the_error_after_it(
    session: FakeSession, given: Give, malformed: dict[str, object]
) -> None:
    session.policy = turns(malformed, SUBMIT)
    assert await run(MiniSwe(given())) is AgentEnd.SUBMITTED
    reply, error = session.requests[1]["messages"][2:]
    assert reply["role"] == "assistant"
    assert (reply["content"], reply.get("tool_calls")) == (malformed["content"] or "", malformed.get("tool_calls"))
    assert error == {"role": "user", "content": BAD_CALL}


async def test_several_calls_in_one_reply_are_all_answered(session: FakeSession, given: Give) -> None:
    both = call("echo one", id="a")
    both["tool_calls"] += call("echo two", id="b")["tool_calls"]
    session.policy = turns(both, SUBMIT)
    assert await run(MiniSwe(given())) is AgentEnd.SUBMITTED
    answers = session.requests[1]["messages"][3:]
    assert [(a["tool_call_id"], a["content"]) for a in answers] == [("a", "one"), ("b", "two")]


def test_an_observation_is_stripped_cut_and_never_empty() -> None:
    assert observation(ExecResult(0, "  a\n\n"), 200) == "a"
    assert observation(ExecResult(0, "x" * 500), 200) == "x" * 200
    assert observation(ExecResult(1, " \n"), 200) == "(no output)"
    assert observation(ExecResult(137, "begun\n", timed_out=True), 200) == "begun\n(timed out)"


async def test_it_ends_when_its_turns_are_used_up_format_errors_included(session: FakeSession, given: Give) -> None:
    session.policy = lambda _: text("hm")
    assert await run(MiniSwe(given(max_turns=5))) is AgentEnd.TURNS
    assert len(session.requests) == 5


@pytest.mark.parametrize(("reason", "end"), [("length", AgentEnd.LENGTH), ("context", AgentEnd.CONTEXT)])
async def test_s7_a_session_that_ended_ends_the_agent_and_says_why(session: FakeSession, given: Give, reason: str, end: AgentEnd) -> None:
    ended = {"status": 404, "code": "session_ended", "reason": reason, "message": f"session_ended: {reason}: it is over"}
    session.trouble = ["none", ended]
    assert await run(MiniSwe(given())) is end
    assert len(session.requests) == 2


async def test_s5_a_retry_sends_the_same_request_id(session: FakeSession, given: Give) -> None:
    session.trouble = ["drop", {"status": 503, "message": "restarting"}, "drop"]
    assert await run(MiniSwe(given())) is AgentEnd.SUBMITTED
    ids = [r["x-request-id"] for r in session.requests]
    assert len(set(ids[:4])) == 1
    assert len(set(ids[3:])) == 3


async def test_a_session_server_that_restarts_is_waited_for(session: FakeSession, given: Give) -> None:
    """Down when the agent first calls, back at the same port a little later."""
    harness = MiniSwe(given())
    await session._runner.cleanup()
    running = asyncio.create_task(run(harness))
    await asyncio.sleep(0)
    async with FakeSession(session.policy, port=session.port) as back:
        assert await running is AgentEnd.SUBMITTED
        assert len(back.requests) == 3


async def test_s13_a_session_that_stays_away_is_an_infrastructure_failure_and_no_timeout_of_the_agents(
    session: FakeSession, given: Give
) -> None:
    """CASES 1: what isn't the policy's doing is typed where it was seen."""
    session.trouble = [{"status": 502, "boundary": "engine", "cause": "lost", "exception": "HTTP500", "message": "engine gone"}] * 50
    with pytest.raises(InfraError) as caught:
        await run(MiniSwe(given(seconds=0.5)))
    assert (caught.value.boundary, caught.value.cause, caught.value.exception) == (Boundary.ENGINE, Cause.LOST, "HTTP500")


async def test_s13_a_lost_session_and_a_refused_request_are_not_retried(session: FakeSession, given: Give) -> None:
    session.trouble = [{"status": 404, "code": "session_not_found", "message": "unknown session"}]
    with pytest.raises(InfraError) as caught:
        await run(MiniSwe(given()))
    assert (caught.value.boundary, caught.value.cause, len(session.requests)) == (Boundary.SESSION, Cause.LOST, 1)


async def test_s15_the_agents_clock_ends_a_call_that_hangs(session: FakeSession, given: Give) -> None:
    session.trouble = ["hang"]
    started = time.monotonic()
    assert await run(MiniSwe(given(seconds=0.5))) is AgentEnd.TIMEOUT
    assert time.monotonic() - started < 20


async def test_s15_cancel_ends_a_call_in_flight_at_once(session: FakeSession, given: Give) -> None:
    session.trouble = ["hang"]
    harness = MiniSwe(given(seconds=60))
    running = asyncio.create_task(run(harness))
    await asyncio.wait_for(session.hanging.wait(), 10)
    harness.cancel()
    assert await asyncio.wait_for(running, 5) is AgentEnd.TIMEOUT


async def test_s15_cancel_and_kill_end_a_command(session: FakeSession, sandbox: Sandbox, given: Give) -> None:
    session.policy = turns(call("touch begun; sleep 60"))
    harness = MiniSwe(given(seconds=60, command_timeout=50.0))
    running = asyncio.create_task(run(harness))
    async with asyncio.timeout(10):
        while not (sandbox.workdir / "begun").exists():
            await asyncio.sleep(0.005)
    harness.cancel()
    await asyncio.to_thread(sandbox.kill_all)
    assert await asyncio.wait_for(running, 5) is AgentEnd.TIMEOUT


async def test_s15_the_agent_is_told_its_deadline(session: FakeSession, given: Give) -> None:
    session.policy = turns(call("echo $RL360_DEADLINE"), SUBMIT)
    assignment = given()
    await run(MiniSwe(assignment))
    assert abs(float(session.requests[1]["messages"][3]["content"]) - assignment.deadline) < 0.01


LOAD = """
import os, sys
from pathlib import Path
from rl360.agents.harness.mini_swe import load
before = dict(os.environ)
load(Path(sys.argv[1]))
assert dict(os.environ) == before
assert "litellm" not in sys.modules
"""


def test_importing_the_agent_is_silent_and_writes_nothing_to_the_users_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    argv = [sys.executable, "-c", LOAD, str(tmp_path / "scratch")]
    env = {"HOME": str(home), "PATH": os.environ["PATH"]}
    done = subprocess.run(argv, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(home.iterdir()) == []


async def test_the_scripted_agent_runs_commands_solves_and_asks(session: FakeSession, sandbox: Sandbox, given: Give) -> None:
    session.policy = lambda _: text("noted")
    assert await run(Scripted(given(harness="scripted", script=("echo hi", "ask: what now?", "oracle")))) is AgentEnd.SUBMITTED
    assert [m["content"] for m in session.requests[0]["messages"][2:]] == ["hi", "what now?"]
    assert (sandbox.workdir / "answer.txt").read_text() == "42\n"
