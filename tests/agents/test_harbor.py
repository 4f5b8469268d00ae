"""Harbor's own agents, in a child with Harbor's Python. Needs a Python >= 3.12 with harbor: RL360_HARBOR_PYTHON."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl360.agents.harness.base import Assignment
from rl360.agents.harness.harbor_nursery import Nursery
from rl360.agents.harness.harbor_trial import HarborTrial
from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import Sandbox
from rl360.agents.tasks import Task, load_task
from rl360.agents.verify import verify
from rl360.bus.events import AgentEnd, Boundary, Cause
from rl360.config import Agent, HarborAgent
from tests.agents.conftest import Sandboxes
from tests.agents.fake_session import FakeSession, Json, text, turns
from tests.agents.harbor import make_task

PYTHON = os.environ.get("RL360_HARBOR_PYTHON", "")
TASKS = Path(__file__).parent.parent / "fixtures" / "tasks"
needs_tmux = pytest.mark.skipif(
    shutil.which("tmux", path="/usr/bin") is None, reason="terminus-2 types into tmux, which this machine lacks"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs RL360_HARBOR_PYTHON: a Python >= 3.12 in which harbor 0.26 is installed"),
]


def types(*keys: str, complete: bool = False) -> Json:
    """A turn of terminus-2's."""
    commands = [{"keystrokes": f"{k}\n", "duration": 0.2} for k in keys]
    return text(json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete}))


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task")


@pytest.fixture(scope="module")
def nurseries() -> Iterator[dict[str, Nursery]]:
    """One an agent, so that what it imports is imported once."""
    made: dict[str, Nursery] = {}
    yield made
    for nursery in made.values():
        nursery.close()


class Acts:
    """Lets an agent of Harbor's act in a fresh sandbox."""

    def __init__(self, sandboxes: Sandboxes, nurseries: dict[str, Nursery], scratch: Path) -> None:
        self._sandboxes, self._nurseries, self.scratch = sandboxes, nurseries, scratch
        self.trial: HarborTrial | None = None

    async def __call__(self, task: Task, session: FakeSession, agent: str, *, seconds: float = 60.0, max_turns: int = 8) -> AgentEnd:
        sandbox = self._sandboxes.start(task)
        section = HarborAgent(agent=agent, python=PYTHON)
        nursery = self._nurseries.setdefault(agent, Nursery(section, self.scratch.parent / f"{agent}.log"))
        given = Assignment(
            task=task,
            staged=self._sandboxes.stage.get(task),
            sandbox=sandbox,
            config=Agent(harness="harbor", harbor=section, max_turns=max_turns),
            session="t0-g000-a0.1",
            base_url=session.base_url(),
            key="key",
            deadline=time.time() + seconds,
            traceparent="00-1-2-01",
            scratch=self.scratch,
        )
        self.trial = HarborTrial(given, nursery)
        return await asyncio.wait_for(asyncio.to_thread(self.trial.run), 90)

    @property
    def sandbox(self) -> Sandbox:
        return self._sandboxes.made[-1]


@pytest.fixture
def acts(sandboxes: Sandboxes, nurseries: dict[str, Nursery], tmp_path: Path) -> Acts:
    return Acts(sandboxes, nurseries, tmp_path)


def reward(sandboxes: Sandboxes, task: Task) -> float:
    verdict = verify(sandboxes.made[-1], task, sandboxes.stage.get(task), started=time.time(), timeout=10.0)
    assert verdict.receipt.agent_dead_at <= verdict.receipt.written_at
    return verdict.reward


@pytest.mark.parametrize("folder", ["legacy", "env"])
async def test_harbors_oracle_earns_the_highest_reward_and_nop_the_lowest(acts: Acts, sandboxes: Sandboxes, folder: str) -> None:
    task = load_task(TASKS / folder)
    async with FakeSession(lambda _: text("x")) as session:
        assert await acts(task, session, "oracle") is AgentEnd.SUBMITTED
        assert reward(sandboxes, task) == task.high
        assert await acts(task, session, "nop") is AgentEnd.SUBMITTED
        assert reward(sandboxes, task) == task.low
        assert session.requests == []


@needs_tmux
async def test_terminus_2_solves_a_task_through_its_session_alone(acts: Acts, sandboxes: Sandboxes, task: Task) -> None:
    policy = turns(types("echo 42 > /app/answer.txt"), types(complete=True), types(complete=True))
    async with FakeSession(policy) as session:
        assert await acts(task, session, "terminus-2") is AgentEnd.SUBMITTED
        assert [r["authorization"] for r in session.requests] == ["Bearer key"] * 3
        assert "Write 42 to answer.txt" in session.requests[0]["messages"][0]["content"]
    assert reward(sandboxes, task) == 1.0


@needs_tmux
async def test_s17_a_loop_that_terminus_2_leaves_is_dead_before_the_verifier(acts: Acts, sandboxes: Sandboxes, task: Task) -> None:
    loop = "(while true; do echo 1 > /logs/verifier/reward.txt; echo 42 > /app/answer.txt; done) >/dev/null 2>&1 &"
    policy = turns(types(loop), types("rm -f /app/answer.txt", complete=True), types(complete=True))
    async with FakeSession(policy) as session:
        assert await acts(task, session, "terminus-2") is AgentEnd.SUBMITTED
    sandboxes.made[-1].kill_all()
    (sandboxes.made[-1].workdir / "answer.txt").unlink(missing_ok=True)
    assert reward(sandboxes, task) == 0.0


@needs_tmux
async def test_s14_a_terminal_that_the_policy_ended_is_its_own_doing(acts: Acts, sandboxes: Sandboxes, task: Task) -> None:
    async with FakeSession(turns(types("tmux kill-server"), types("ls"))) as session:
        assert await acts(task, session, "terminus-2") in (AgentEnd.SUBMITTED, AgentEnd.ERROR)
    assert reward(sandboxes, task) == 0.0


@needs_tmux
async def test_it_gets_no_more_turns_than_the_recipe_gives(acts: Acts, task: Task) -> None:
    async with FakeSession(lambda _: types("true")) as session:
        assert await acts(task, session, "terminus-2", max_turns=2) is AgentEnd.TURNS
        assert len(session.requests) == 2


@needs_tmux
async def test_s7_the_sessions_end_is_the_agents_end(acts: Acts, task: Task) -> None:
    async with FakeSession(lambda _: types("true")) as session:
        session.trouble = [{"status": 404, "code": "session_ended", "reason": "length", "message": "session_ended: length"}]
        assert await acts(task, session, "terminus-2") is AgentEnd.LENGTH


@needs_tmux
async def test_s15_a_model_call_that_hangs_is_ended_by_the_agents_clock(acts: Acts, task: Task) -> None:
    async with FakeSession(lambda _: types("true")) as session:
        session.trouble = ["hang"]
        acting = asyncio.create_task(acts(task, session, "terminus-2"))
        await asyncio.wait_for(session.hanging.wait(), 30)
        assert acts.trial is not None
        acts.trial.cancel()
        assert await asyncio.wait_for(acting, 10) is AgentEnd.TIMEOUT


@needs_tmux
async def test_s13_a_request_that_the_session_refuses_is_no_failure_of_the_agents(acts: Acts, task: Task) -> None:
    async with FakeSession(lambda _: types("true")) as session:
        session.trouble = [{"status": 400, "message": "no such parameter"}] * 50
        with pytest.raises(InfraError) as caught:
            await acts(task, session, "terminus-2")
        assert (caught.value.boundary, caught.value.cause) == (Boundary.SESSION, Cause.REFUSED)


async def test_s13_a_sandbox_that_dies_is_named_as_what_failed(acts: Acts, sandboxes: Sandboxes, tmp_path: Path) -> None:
    task = make_task(tmp_path / "slow", solution="touch /app/begun; sleep 60\n")
    async with FakeSession(lambda _: text("x")) as session:
        acting = asyncio.create_task(acts(task, session, "oracle"))
        while not acting.done() and not (sandboxes.made and (sandboxes.made[-1].workdir / "begun").exists()):
            await asyncio.sleep(0.02)
        sandboxes.made[-1].kill_all()
        with pytest.raises(InfraError) as caught:
            await acting
        assert caught.value.boundary is Boundary.SANDBOX
