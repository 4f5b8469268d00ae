"""Tasks in Harbor's format: parsed, checked, digested. A malformed one names the file, the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.agents.lint import lint
from rl360.agents.staging import Stage
from rl360.agents.task_file import megabytes
from rl360.agents.tasks import TaskError, TaskIndex, digest_of_folder, load_task, load_tasks
from rl360.config import BudgetSection
from tests.agents.harbor import make_task, write_task


def test_a_task_is_read_with_its_own_numbers(tmp_path: Path) -> None:
    toml = """
[task]
name = "answer"
[metadata]
category = "arithmetic"
[agent]
timeout_sec = 7.5
[verifier]
timeout_sec = 3
reward_min = -1
[environment]
workdir = "/testbed/"
memory = "2G"
storage = "3G"
cpus = 2
env = { MODE = "fast" }
"""
    task = make_task(tmp_path / "t", toml=toml, files={"a/b.txt": "x", "c": "y"})
    assert (task.name, task.domain, task.workdir) == ("answer", "arithmetic", "/testbed")
    assert (task.agent_timeout, task.verifier_timeout, task.memory_mb, task.storage_mb, task.cpus) == (7.5, 3.0, 2048, 3072, 2.0)
    assert (task.low, task.high, task.env, task.oracle) == (-1.0, 1.0, {"MODE": "fast"}, True)
    assert task.files == ("a/b.txt", "c")  # the Dockerfile describes an image, and is no file of the workdir


def test_defaults_and_the_range_of_metadata(tmp_path: Path) -> None:
    task = make_task(tmp_path / "plain", solution=None)
    assert (task.name, task.domain, task.workdir, task.low, task.high, task.oracle) == ("plain", "default", "/app", 0.0, 1.0, False)
    assert make_task(tmp_path / "m", toml="[metadata]\nreward_range = [0, 10]\n").high == 10.0


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ("[agent]\ntimeout_sec = 'soon'\n", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = 0\n", "agent.timeout_sec"),
        ("[environment]\ncpus = -1\n", "environment.cpus"),
        ("[environment]\nmemory = 'lots'\n", "environment.memory"),
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ("[environment]\nos = 'windows'\n", "environment.os"),
        ("[environment]\nworkdir = 'app'\n", "environment.workdir"),
        ("[environment]\nworkdir = '/usr/src/app'\n", "environment.workdir"),
        ("[environment]\nenv = { A = 1 }\n", "environment.env"),
        ("[verifier]\nreward_min = 2\n", "verifier.reward_max"),
        ("[verifier]\nreward_max = inf\n", "verifier.reward_max"),
        ("[metadata]\nreward_range = [0]\n", "metadata.reward_range"),
        ("[[steps]]\nnam = 'one'\n", "steps[0]"),
        ("[environment]\nmemory = '1G'\nmemory_mb = 2000\n", "environment.memory"),
        ("[environment]\nnetwork_mode = 'sometimes'\n", "environment.network_mode"),
        ("schema_version = 1.4.2\n", "not valid TOML"),
    ],
)
def test_a_malformed_task_names_file_key_and_remedy(tmp_path: Path, toml: str, key: str) -> None:
    folder = write_task(tmp_path / "bad")
    (folder / "task.toml").write_text(toml)
    with pytest.raises(TaskError) as caught:
        load_task(folder)
    message = str(caught.value)
    assert str(folder / "task.toml") in message
    assert key in message
    assert lint(folder)[0].level == "error"


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = write_task(tmp_path / "bad")
    (folder / missing).unlink()
    with pytest.raises(TaskError, match=missing):
        load_task(folder)


def test_an_empty_instruction_and_a_binary_one_are_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "bad", instruction=" \n")
    with pytest.raises(TaskError, match="empty"):
        load_task(folder)
    (folder / "instruction.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="UTF-8"):
        load_task(folder)


def test_unknown_keys_are_findings_and_no_errors(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", toml="bogus = 1\n[agentt]\nx = 1\n[environment]\nmemoryy = 3\n")
    assert load_task(folder).unknown_keys == ("bogus", "agentt", "environment.memoryy")
    assert sum("no effect" in f.message for f in lint(folder)) == 3


def test_lint_says_what_will_fail_a_qualification(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", test="set -e\npip install x\nfalse\n", solution=None)
    said = " ".join(f.message for f in lint(folder))
    for part in ("run bit", "neither reward.txt", "sets -e", "network", "solution/solve.sh"):
        assert part in said


def test_the_digest_sees_names_bytes_and_run_bits_and_nothing_else(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t")
    first = digest_of_folder(folder)
    (folder / "tests/test.sh").touch()
    assert digest_of_folder(folder) == first
    (folder / "tests/test.sh").chmod(0o755)
    with_run_bit = digest_of_folder(folder)
    (folder / "environment/notes.txt").rename(folder / "environment/note.txt")
    assert len({first, with_run_bit, digest_of_folder(folder)}) == 3


def test_a_changed_task_is_not_staged(tmp_path: Path) -> None:
    """What was admitted is what runs."""
    task = make_task(tmp_path / "t")
    (task.dir / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    with pytest.raises(TaskError, match="changed"):
        Stage(tmp_path / "stage").get(task)
    with pytest.raises(TaskError, match="no folder with digest"):
        TaskIndex(tmp_path).find("t", task.digest)


def test_two_tasks_of_one_name_and_no_task_at_all(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no task\.toml"):
        load_tasks(tmp_path)
    for folder in ("a", "b"):
        write_task(tmp_path / folder, toml='[task]\nname = "same"\n')
    with pytest.raises(TaskError, match="rename one"):
        load_tasks(tmp_path)


def test_s15_a_tasks_own_clocks_only_shorten_the_recipes(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", toml="[agent]\ntimeout_sec = 5\n[verifier]\ntimeout_sec = 5000\n")
    budgets = task.budgets(BudgetSection())
    assert (budgets.agent, budgets.verify) == (5.0, BudgetSection().verify)


@given(st.integers(1, 10**6), st.sampled_from(["M", "MB", "Mi", "MiB", "m", ""]))
def test_legacy_sizes(size: int, unit: str) -> None:
    assert megabytes(f"{size}{unit}") == (size if unit else max(1, round(size / 1024**2)))
