"""A task is admitted only when nothing gets the lowest reward and its own solution the highest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl360.agents import qualify
from rl360.agents.qualify import qualifications, qualify_all
from rl360.agents.sandbox.base import LABEL
from rl360.agents.sandbox.leases import labelled
from rl360.agents.tasks import TaskError, load_task
from rl360.config import Config, parse
from tests.agents.harbor import make_task

TASKS = Path(__file__).parent.parent / "fixtures" / "tasks"
WRITE = "> /logs/verifier/reward.txt\n"


def test_a_good_task_is_qualified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(tmp_path / "t", toml="[verifier]\nreward_min = -1\n", test=f"r=-1; [ -e answer.txt ] && r=1; echo $r {WRITE}")
    first = qualify_all([task], sandboxes=tmp_path / "sandboxes", cache=tmp_path / "cache", config=Config())
    assert (first[0].noop, first[0].oracle, first[0].problem) == (-1.0, 1.0, "")
    assert list((tmp_path / "sandboxes").iterdir()) == []
    monkeypatch.setattr(qualify, "qualify", None)  # a second time nothing runs
    assert qualify_all([task], sandboxes=tmp_path / "sandboxes", cache=tmp_path / "cache", config=Config()) == first


@pytest.mark.parametrize(
    ("test", "solution", "problem"),
    [
        (f"echo 1 {WRITE}", "true\n", "doing nothing is rewarded with 1"),
        (f"echo 0 {WRITE}", "true\n", "the oracle is rewarded with 0"),
        (f"set -e; [ -e answer.txt ]; echo 1 {WRITE}", "touch answer.txt\n", "the no-op run gave no reward"),
        (f"[ -e answer.txt ] && exit; echo 0 {WRITE}", "touch answer.txt\n", "the oracle run gave no reward"),
        (f"echo 0 {WRITE}", None, "solution/solve.sh is missing"),
    ],
)
def test_a_task_whose_reward_says_nothing_is_refused(tmp_path: Path, test: str, solution: str | None, problem: str) -> None:
    task = make_task(tmp_path / "t", test=test, solution=solution)
    with pytest.raises(TaskError, match=problem) as caught:
        qualify_all([task], sandboxes=tmp_path / "sandboxes", cache=tmp_path / "cache", config=Config())
    assert "1 of 1" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []
    assert list((tmp_path / "sandboxes").iterdir()) == []


@pytest.mark.parametrize("kind", ["bwrap", "subprocess"])
def test_the_oracle_sees_its_own_files_and_environment(tmp_path: Path, kind: str) -> None:
    toml = '[solution.env]\nANSWER = "42"\n'
    task = make_task(tmp_path / "t", toml=toml, solution='[ -e /solution/solve.sh ] && cd /app && echo "$ANSWER" > answer.txt\n')
    config = parse({"sandbox": {"kind": kind}})
    (result,) = qualify_all([task], sandboxes=tmp_path / "sandboxes", cache=tmp_path / "cache", config=config)
    assert result.oracle == 1.0


@pytest.mark.parametrize("name", ["legacy", "env", "healthcheck", "artifacts", "separate-verifier", "steps"])
def test_every_feature_qualifies_as_it_is_played_in_a_run(tmp_path: Path, name: str) -> None:
    task = load_task(TASKS / name)
    (result,) = qualify_all([task], sandboxes=tmp_path / "sandboxes", cache=tmp_path / "cache", config=Config())
    assert (result.noop, result.oracle) == (0.0, 1.0)
    assert list((tmp_path / "sandboxes").iterdir()) == []


def test_a_place_that_never_gets_healthy_is_the_problem_and_no_reward(tmp_path: Path) -> None:
    (result,) = qualifications([load_task(TASKS / "never-healthy")], sandboxes=tmp_path / "s", cache=tmp_path / "cache", config=Config())
    assert (result.noop, result.oracle) == (None, None)
    assert "never passed" in result.problem


def test_an_interrupt_keeps_what_was_done_and_leaves_nothing_running(tmp_path: Path) -> None:
    tasks = [make_task(tmp_path / "quick"), make_task(tmp_path / "slow", test="sleep 1000\n")]

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qualifications(tasks, sandboxes=tmp_path / "s", cache=tmp_path / "cache", config=Config(), each=interrupt)
    assert [p.stem for p in (tmp_path / "cache").iterdir()] == [tasks[0].digest]
    assert list((tmp_path / "s").iterdir()) == []
    assert labelled(f"{LABEL}=qualify-{os.getpid()}-".encode()) == []
