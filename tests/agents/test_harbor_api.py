"""The routes that Miles calls: a reward only where a verifier wrote one, null else, never 0."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rl360.agents.harbor_api import HarborApi
from rl360.agents.playground import playground
from rl360.agents.runner import harness_maker
from rl360.agents.sandbox.base import LABEL
from rl360.agents.sandbox.leases import labelled
from rl360.agents.tasks import Task, load_task
from rl360.config import parse
from tests.agents.fake_session import SUBMIT, FakeSession, call, turns
from tests.agents.harbor import make_task

TASKS = Path(__file__).parent.parent / "fixtures" / "tasks"


class Client:
    def __init__(self, http: aiohttp.ClientSession, url: str, session: FakeSession) -> None:
        self._http, self._url, self._session = http, url, session

    async def run(self, task: str, **more: Any) -> dict[str, Any]:
        body = {"instance_id": task, "base_url": self._session.base_url(), "model": "openai/model", "sampling_params": {"temperature": 0.5}}
        async with self._http.post(f"{self._url}/run", json={**body, **more}) as reply:
            return {"status": reply.status, **await reply.json()}

    async def flush(self, key: str = "", **body: str) -> dict[str, Any]:
        async with self._http.post(f"{self._url}/flush", json=body, headers={"Authorization": f"Bearer {key}"}) as reply:
            return {"status": reply.status, **await reply.json()}

    async def health(self) -> dict[str, Any]:
        async with self._http.get(f"{self._url}/health") as reply:
            return await reply.json()


@asynccontextmanager
async def serving(tmp_path: Path, session: FakeSession, *tasks: Task, admin: str = "", **agent: Any) -> AsyncIterator[Client]:
    config = parse({"agent": {"command_timeout": 30.0, **agent}})
    with playground(tmp_path / "sandboxes", config, "serve") as ground:
        api = HarborApi({t.name: t for t in tasks}, ground, harness_maker(config.agent, ground.scratch), 4, admin)
        runner = web.AppRunner(api.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as http:
            yield Client(http, f"http://127.0.0.1:{runner.addresses[0][1]}", session)
        await runner.cleanup()
        assert labelled(f"{LABEL}=serve-{os.getpid()}-".encode()) == []
    assert list((tmp_path / "sandboxes").iterdir()) == []


@pytest.fixture
async def session() -> AsyncIterator[FakeSession]:
    async with FakeSession(turns(call("echo 42 > answer.txt"), SUBMIT)) as server:
        yield server


async def test_a_run_gives_the_verifiers_reward_with_its_receipt(tmp_path: Path, session: FakeSession) -> None:
    async with serving(tmp_path, session, make_task(tmp_path / "tasks" / "sum")) as client:
        assert await client.health() == {"status": "ok", "tasks": 1, "running": 0}
        reply = await client.run("sum", agent_name="mini-swe-agent", max_seq_len=100)
    assert (reply["status"], reply["reward"], reply["exit_status"]) == (200, 1.0, "submitted")
    assert reply["eval_report"]["receipt"]["file"] == "reward.txt"
    assert reply["agent_metrics"].keys() == {"agent_seconds", "total_seconds"}


async def test_steps_are_played_as_in_a_run(tmp_path: Path, session: FakeSession) -> None:
    session.policy = lambda history: SUBMIT
    async with serving(tmp_path, session, load_task(TASKS / "steps")) as client:
        reply = await client.run("steps")
    assert (reply["reward"], [s["step"] for s in reply["eval_report"]["steps"]]) == (0.0, ["first"])


@pytest.mark.parametrize(
    ("test", "status"),
    [("true\n", "infra/verifier/no_reward"), ("echo nan > /logs/verifier/reward.txt\n", "infra/verifier/bad_reward")],
)
async def test_s12_no_reward_is_null_and_never_0(tmp_path: Path, session: FakeSession, test: str, status: str) -> None:
    async with serving(tmp_path, session, make_task(tmp_path / "tasks" / "silent", test=test)) as client:
        reply = await client.run("silent")
    assert (reply["status"], reply["reward"], reply["exit_status"]) == (200, None, status)


async def test_s13_a_session_that_is_gone_is_a_typed_failure_and_null(tmp_path: Path, session: FakeSession) -> None:
    session.trouble = [{"status": 404, "message": "no such session"}]
    async with serving(tmp_path, session, make_task(tmp_path / "tasks" / "sum")) as client:
        reply = await client.run("sum")
    assert (reply["reward"], reply["eval_report"]["boundary"], reply["eval_report"]["cause"]) == (None, "session", "lost")


async def test_flush_cancels_the_runs_of_one_session_server(tmp_path: Path, session: FakeSession) -> None:
    session.trouble = ["hang"]
    async with serving(tmp_path, session, make_task(tmp_path / "tasks" / "sum"), admin="s3cret") as client:
        hanging = asyncio.create_task(client.run("sum", session_server_instance_id="a"))
        await asyncio.wait_for(session.hanging.wait(), 20)
        assert (await client.flush())["status"] == 401
        assert (await client.flush("s3cret", session_server_instance_id="b"))["cancelled"] == 0
        assert (await client.flush("s3cret", session_server_instance_id="a"))["cancelled"] == 1
        reply = await hanging
        assert (reply["reward"], reply["eval_report"]["cause"]) == (None, "cancelled")
        assert (await client.run("sum"))["reward"] == 1.0  # the others go on


async def test_a_client_that_goes_away_and_a_server_that_stops_leave_nothing(tmp_path: Path, session: FakeSession) -> None:
    session.trouble = ["hang", "hang"]
    async with serving(tmp_path, session, make_task(tmp_path / "tasks" / "sum")) as client:
        gone = asyncio.create_task(client.run("sum"))
        await asyncio.wait_for(session.hanging.wait(), 20)
        gone.cancel()
        session.hanging.clear()
        stays = asyncio.create_task(client.run("sum"))
        await asyncio.wait_for(session.hanging.wait(), 20)
    with pytest.raises((aiohttp.ClientError, asyncio.CancelledError, RuntimeError)):
        await stays


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"instance_id": "other"}, 404),
        ({"base_url": "file:///etc/passwd"}, 400),
        ({"base_url": None}, 400),
        ({"agent_name": "terminus-2"}, 400),
    ],
)
async def test_what_cant_be_run_is_refused_with_a_reason(tmp_path: Path, session: FakeSession, body: dict[str, Any], status: int) -> None:
    async with serving(tmp_path, session, make_task(tmp_path / "tasks" / "sum")) as client:
        reply = await client.run(body.pop("instance_id", "sum"), **body)
    assert reply["status"] == status
    assert reply["error"]
