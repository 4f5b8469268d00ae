"""Steps, healthchecks, artifacts, environments and a verifier's own place, on a real runner and real sandboxes."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rl360.agents.tasks import load_task
from rl360.bus.client import Bus
from rl360.bus.events import AgentEnd, Boundary, Cause, InfraFailed, Phase, RolloutPhase, VerifierResult
from tests.agents.fake_session import SUBMIT, FakeSession, call
from tests.agents.test_runner import Stage, quick, session  # noqa: F401  (fixtures)

# ruff: noqa: F811  (a fixture's name is its argument's)

TASKS = Path(__file__).parent.parent / "fixtures" / "tasks"
ORACLE: dict[str, Any] = {"script": ["oracle"]}


class Tasks:
    """A stage with one of the fixture tasks."""

    def __init__(self, bus: Bus, session: FakeSession, folder: Path) -> None:
        self._bus, self._session, self._dir = bus, session, folder

    async def play(
        self, name: str, edit: tuple[str, str] | None = None, setup: float = 20.0, **sections: dict[str, Any]
    ) -> VerifierResult | InfraFailed:
        folder = self._dir / "tasks/train" / name
        shutil.copytree(TASKS / name, folder)
        if edit:
            toml = folder / "task.toml"
            toml.write_text(toml.read_text().replace(*edit))
        stage = Stage(self._bus, self._session, self._dir, load_task(folder))
        async with stage.running(**sections):
            await stage.admit(setup=setup)
            outcome = await stage.outcome()
        assert stage.nothing_left()
        assert len(self._session.closed) == 1
        return outcome


@pytest.fixture
def tasks(bus: Bus, session: FakeSession, tmp_path: Path) -> Tasks:
    return Tasks(bus, session, tmp_path)


def rewarded(outcome: VerifierResult | InfraFailed) -> VerifierResult:
    assert isinstance(outcome, VerifierResult), outcome
    return outcome


@pytest.mark.parametrize("name", ["legacy", "env", "healthcheck", "artifacts", "separate-verifier", "steps"])
@pytest.mark.parametrize(("agent", "reward"), [(ORACLE, 1.0), ({"script": ["true"]}, 0.0)])
async def test_the_oracle_gets_all_and_nothing_gets_nothing(tasks: Tasks, name: str, agent: dict[str, Any], reward: float) -> None:
    assert rewarded(await tasks.play(name, agent=agent)).reward == reward


# ---------------------------------------------------------------------------------------------------- steps


async def test_each_step_has_its_verdict_and_the_reward_is_their_mean(tasks: Tasks) -> None:
    result = rewarded(await tasks.play("steps", agent={"script": ["echo one >> words.txt"]}))
    assert [(s.step, s.reward) for s in result.steps] == [("first", 1.0), ("second", 0.0)]
    assert (result.reward, result.receipt) == (0.5, result.steps[1].receipt)
    assert result.steps[0].receipt.verifier_digest != result.steps[1].receipt.verifier_digest


async def test_the_last_steps_reward_counts_where_the_task_says_so(tasks: Tasks) -> None:
    assert rewarded(await tasks.play("steps", ('"mean"', '"final"'), agent={"script": ["echo one >> words.txt"]})).reward == 0.0


async def test_a_step_below_its_min_reward_is_the_last(tasks: Tasks, bus: Bus) -> None:
    result = rewarded(await tasks.play("steps", agent={"script": ["echo two >> words.txt"]}))
    assert [(s.step, s.reward) for s in result.steps] == [("first", 0.0)]
    assert result.reward == 0.0


async def test_each_step_is_a_conversation_of_its_own_in_one_session(tasks: Tasks, session: FakeSession) -> None:
    def policy(history: list[dict[str, Any]]) -> dict[str, Any]:
        if any(m["role"] == "assistant" for m in history):
            return SUBMIT
        return call("echo one >> words.txt" if "word one" in history[1]["content"] else "cat next.txt >> words.txt")

    session.policy = policy
    result = rewarded(await tasks.play("steps", agent={"harness": "mini_swe", "script": []}))
    assert (result.reward, result.agent_end) == (1.0, AgentEnd.SUBMITTED)
    assert len(session.opened) == 1
    first_words = [r["messages"][1]["content"][:20] for r in session.requests]
    assert [w for w, n in pairwise(first_words) if w != n] == ["Append the word one "]


async def test_a_phase_is_told_once_whatever_the_number_of_steps(tasks: Tasks, bus: Bus) -> None:
    await tasks.play("steps", agent=ORACLE)
    ended = [r.event async for r in bus.replay(types=[RolloutPhase])]
    assert [e.phase for e in ended if isinstance(e, RolloutPhase) and e.end is not None] == [
        Phase.QUEUE,
        Phase.SETUP,
        Phase.AGENT,
        Phase.COLLECT,
        Phase.VERIFY,
    ]


async def test_what_a_step_leaves_outside_its_workdir_ends_with_it(tasks: Tasks) -> None:
    script = ["oracle", "test -e /tmp/kept && rm words.txt", "touch /tmp/kept; sleep 1000 & true"]
    assert rewarded(await tasks.play("steps", agent={"script": script})).reward == 1.0


# ---------------------------------------------------------------------------------------------------- setup


async def test_a_place_that_never_gets_healthy_is_a_typed_setup_failure(tasks: Tasks) -> None:
    outcome = await tasks.play("never-healthy", agent=ORACLE)
    assert isinstance(outcome, InfraFailed)
    assert (outcome.boundary, outcome.cause, outcome.exception) == (Boundary.SANDBOX, Cause.START_FAILED, "Unhealthy")
    assert "the server is down" in outcome.detail
    assert outcome.agent_end is None


async def test_s15_a_healthcheck_that_hangs_ends_with_the_setup_clock(tasks: Tasks) -> None:
    outcome = await tasks.play("never-healthy", ("echo the server is down; false", "sleep 1000"), setup=0.5)
    assert isinstance(outcome, InfraFailed)
    assert (outcome.boundary, outcome.cause) == (Boundary.SANDBOX, Cause.TIMEOUT)


# ---------------------------------------------------------------------------------------------------- artifacts


def kept(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)).partition("/")[2]: p.read_text() for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"
    }


async def test_artifacts_are_kept_by_session_without_what_is_excluded(tasks: Tasks, tmp_path: Path) -> None:
    await tasks.play("artifacts", agent=ORACLE)
    assert kept(tmp_path / "artifacts") == {"app/answer.txt": "42\n", "kept/how.md": "sum\n"}


async def test_s17_nothing_of_the_host_is_kept_through_a_hostile_workdir(tasks: Tasks, tmp_path: Path) -> None:
    script = [
        "ln -s /etc/passwd answer.txt; mkdir notes; ln -s / notes/root; mkfifo notes/pipe; truncate -s 1T notes/hole; echo x > notes/x"
    ]
    await tasks.play("artifacts", agent={"script": script})
    assert kept(tmp_path / "artifacts") == {"kept/x": "x\n"}
    (manifest,) = (tmp_path / "artifacts").rglob("manifest.json")
    refused = {e["path"]: e["refused"] for e in json.loads(manifest.read_text()) if e["refused"]}
    assert set(refused) == {"app/answer.txt", "kept/root", "kept/pipe", "kept/hole"}


async def test_s17_a_folder_that_became_a_link_is_not_followed(tasks: Tasks, tmp_path: Path) -> None:
    await tasks.play("artifacts", ('"/app/answer.txt"', '"/app/sub/passwd"'), agent={"script": ["ln -s /etc sub"]})
    assert kept(tmp_path / "artifacts") == {}


# ---------------------------------------------------------------------------------------------------- a verifier's own place


async def test_s17_a_separate_verifier_sees_the_artifacts_and_nothing_else_of_the_agents(tasks: Tasks) -> None:
    forged = ["echo 'echo 41' > tool.sh; echo 41 > answer.txt"]
    assert rewarded(await tasks.play("separate-verifier", agent={"script": forged})).reward == 0.0


async def test_s17_an_artifact_that_is_a_link_is_not_handed_over(tasks: Tasks) -> None:
    assert rewarded(await tasks.play("separate-verifier", agent={"script": ["ln -s tool.sh answer.txt"]})).reward == 0.0
