"""A run's tasks are checked before anything starts: the first bad one is named, and what looks wrong is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.agents.tasks import TaskError
from rl360.config import Config, ConfigError, Tasks
from rl360.launch import prepare
from rl360.launch.rundir import RunDir


def folder_with(tmp_path: Path, **tasks: object) -> RunDir:
    folder = RunDir(tmp_path / "run")
    folder.create(Config(tasks=Tasks(groups_per_step=2, pool=2, eval_pool=0, **tasks)))  # type: ignore[arg-type]
    return folder


def copy_of_starters(tmp_path: Path) -> Path:
    from rl360.tiny.shell_tasks import make_tasks

    source = tmp_path / "source"
    make_tasks(source, seed=5, count=2, split="train")
    return source


async def test_own_tasks_are_copied_and_qualified(tmp_path: Path) -> None:
    said: list[str] = []
    folder = folder_with(tmp_path, source=str(copy_of_starters(tmp_path)))
    await prepare.tasks(folder, said.append)
    assert said == ["tasks: 2 to train on, 0 held out, qualified"]


async def test_a_task_that_doing_nothing_solves_is_refused(tmp_path: Path) -> None:
    source = copy_of_starters(tmp_path)
    for test in source.glob("*/tests/test.sh"):
        test.write_text("echo 1 > /logs/verifier/reward.txt\n")
    with pytest.raises(TaskError, match="2 of 2 tasks don't qualify"):
        await prepare.tasks(folder_with(tmp_path, source=str(source)), print)


async def test_a_malformed_task_is_named(tmp_path: Path) -> None:
    source = copy_of_starters(tmp_path)
    next(source.glob("*/task.toml")).write_text("[agent\n")
    with pytest.raises(TaskError, match=r"task\.toml"):
        await prepare.tasks(folder_with(tmp_path, source=str(source)), print)


async def test_what_looks_wrong_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    source = copy_of_starters(tmp_path)
    test = next(source.glob("*/tests/test.sh"))
    test.write_text("#!/bin/sh\nset -e\n" + test.read_text())
    await prepare.tasks(folder_with(tmp_path, source=str(source), qualify=False), said.append)
    assert any(line.startswith("warning:") and "sets -e" in line for line in said)


async def test_too_few_tasks_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks.source.*not a folder"):
        await prepare.tasks(folder_with(tmp_path, source=str(tmp_path / "none")), print)
    other = RunDir(tmp_path / "few")
    other.create(Config(tasks=Tasks(groups_per_step=3, pool=3, source=str(copy_of_starters(tmp_path)))))
    with pytest.raises(ConfigError, match=r"groups_per_step is 3"):
        await prepare.tasks(other, print)
