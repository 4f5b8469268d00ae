"""`rl360 tasks`: lint, qualify and calibrate, as a user runs them."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rl360.agents.calibrate import BANDS, band
from rl360.agents.tasks import load_task
from rl360.cli import main
from tests.agents.fake_session import SUBMIT, FakeSession, call
from tests.agents.harbor import write_task

TASKS = Path(__file__).parent.parent / "fixtures" / "tasks"


def test_lint_prints_each_refusal_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "lint", str(TASKS)]) == 1
    out = capsys.readouterr().out
    assert "key 'environment.gpus'" in out
    assert "      1  error    environment.gpus" in out
    assert "13 tasks, 6 refused" in out


def test_lint_as_json_has_every_finding_with_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tasks", "lint", str(TASKS), "--json", "--sandbox", "docker"])
    told = json.loads(capsys.readouterr().out)
    assert (told["tasks"], told["refused"], told["sandbox"]) == (13, 7, "docker")
    assert {"steps", "environment.gpus"} <= {f["rule"] for f in told["findings"]}


def test_a_folder_without_tasks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "lint", str(tmp_path)]) == 2
    assert "no task.toml below it" in capsys.readouterr().err


def test_qualify_a_second_time_starts_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "tasks" / "good")
    command = ["tasks", "qualify", str(tmp_path / "tasks"), "--cache", str(tmp_path / "cache")]
    assert main(command) == 0
    monkeypatch.setattr("rl360.agents.qualify.playground", None)
    assert main([*command, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (result["noop"], result["oracle"], result["problem"]) == (0.0, 1.0, "")


def test_what_is_refused_doesnt_qualify_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "tasks" / "good")
    write_task(tmp_path / "tasks" / "gpu", toml="[environment]\ngpus = 1\n")
    assert main(["tasks", "qualify", str(tmp_path / "tasks"), "--cache", str(tmp_path / "cache")]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 tasks qualify" in out
    assert "environment.gpus" in out


# ---------------------------------------------------------------------------------------------------- calibrate


def test_bands_cover_every_rate_once() -> None:
    assert {band(k, 100) for k in range(101)} == {*BANDS}
    assert [band(k, 5) for k in range(6)] == ["0%", "0-20%", "20-40%", "40-60%", "60-80%", "100%"]


class Policy:
    """Solves "easy" always, "hard" never, "half" every second time."""

    def __init__(self) -> None:
        self.begun = 0

    def __call__(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        if any(m["role"] == "assistant" for m in history):
            return SUBMIT
        self.begun += 1
        task = history[1]["content"]
        solves = task == "easy" or (task == "half" and self.begun % 2)
        return call("echo 42 > answer.txt" if solves else "true")


def calibrate(root: Path, url: str, *more: str) -> int:
    where = ["--url", url, "--model", "tiny", "--workers", "1", "--set", "sandbox.memory_mb=64"]
    return main(["tasks", "calibrate", str(root / "tasks"), "--cache", str(root / "cache"), *where, *more])


async def test_calibrate_by_url_tells_bands_with_n_and_seed_and_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("easy", "half", "hard"):
        write_task(tmp_path / "tasks" / name, instruction=name)
    policy = Policy()
    async with FakeSession(policy) as server:
        url = f"{server.url}/sessions/x/v1"
        assert await asyncio.to_thread(calibrate, tmp_path, url, "--attempts", "4", "--seed", "7") == 0
        out = capsys.readouterr().out
        assert "    100%      4/4     0  easy" in out
        assert "      0%      0/4     0  hard" in out
        assert "  40-60%      2/4     0  half" in out
        assert "n = 4, seed 7" in out
        begun = policy.begun
        assert await asyncio.to_thread(calibrate, tmp_path, url, "--attempts", "4", "--seed", "7") == 0
        assert policy.begun == begun  # all are kept
        assert await asyncio.to_thread(calibrate, tmp_path, url, "--attempts", "5", "--seed", "7", "--json") == 0
        assert policy.begun == begun + 3
    bands = json.loads(capsys.readouterr().out.splitlines()[-1])["bands"]
    assert (bands["0%"], bands["100%"]) == (1, 1)
    assert list((tmp_path / "cache" / "sandboxes").iterdir()) == []


async def test_s12_an_attempt_without_a_reward_is_no_failure_of_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "tasks" / "silent", instruction="easy", test="true\n")
    async with FakeSession(Policy()) as server:
        await asyncio.to_thread(calibrate, tmp_path, f"{server.url}/sessions/x/v1", "--attempts", "2", "--json")
    told = json.loads(capsys.readouterr().out)
    (result,) = told["results"]
    assert (result["n"], result["band"], len(result["failures"])) == (0, "unknown", 2)
    assert "no_reward" in result["failures"]["0"]


async def test_an_interrupt_ends_an_agent_that_waits_for_its_model_and_keeps_what_was_done(tmp_path: Path) -> None:
    for name in ("easy", "hard"):
        write_task(tmp_path / "tasks" / name, instruction=name)
    async with FakeSession(Policy()) as server:
        server.trouble = ["none", "none", "hang"]  # the first attempt has two turns
        where = ("--url", f"{server.url}/sessions/x/v1", "--model", "tiny", "--workers", "1", "--attempts", "2", "--json")
        command = (sys.executable, "-m", "rl360", "tasks", "calibrate", str(tmp_path / "tasks"), "--cache", str(tmp_path / "cache"), *where)
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
        await asyncio.wait_for(server.hanging.wait(), 30)
        child.send_signal(signal.SIGINT)
        out, _ = await asyncio.wait_for(child.communicate(), 20)
    told = json.loads(out)
    assert (child.returncode, told["interrupted"]) == (130, True)
    assert {r["task"]: r["n"] for r in told["results"]} == {"easy": 1, "hard": 0}
    assert list((tmp_path / "cache" / "sandboxes").iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--model", "x"], ["--url", "http://x/v1"], ["--url", "ftp://x", "--model", "x"]])
def test_a_policy_that_isnt_named_is_refused(tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "tasks" / "one")
    assert main(["tasks", "calibrate", str(tmp_path / "tasks"), *options]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.slow
def test_calibrate_by_recipe_plays_its_own_policy_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        write_task(tmp_path / "tasks" / name)
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[run]\nname = "cal"\n[agent]\nharness = "scripted"\nscript = ["ask: hello", "oracle"]\n[runners]\ncount = 1\nslots = 4\n'
    )
    command = [
        "tasks",
        "calibrate",
        str(tmp_path / "tasks"),
        "--recipe",
        str(recipe),
        "--cache",
        str(tmp_path / "cache"),
        "--attempts",
        "2",
    ]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {r["task"]: (r["passes"], r["n"]) for r in told["results"]} == {"one": (2, 2), "two": (2, 2)}
    assert main(command) == 0  # at once: all is kept
    assert load_task(tmp_path / "tasks" / "one").digest in {r["digest"] for r in told["results"]}
