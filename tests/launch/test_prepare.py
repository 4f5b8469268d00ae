"""A run's tasks are checked before anything starts: the first bad one is named, and what looks wrong is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rl360.agents.tasks import TaskError
from rl360.cli import main
from rl360.config import Config, ConfigError, Policy, Sessions, Tasks
from rl360.launch import prepare
from rl360.launch.rundir import RunDir
from rl360.tiny import policy_folder

ROOT = Path(__file__).parents[2]


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


async def test_too_few_tasks_are_refused(tmp_path: Path) -> None:
    other = RunDir(tmp_path / "few")
    other.create(Config(tasks=Tasks(groups_per_step=3, pool=3, source=str(copy_of_starters(tmp_path)))))
    with pytest.raises(ConfigError, match=r"groups_per_step is 3"):
        await prepare.tasks(other, print)


def test_tasks_that_are_not_there_are_refused_before_a_folder_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", str(ROOT / "recipes" / "tiny.toml"), "--dir", str(tmp_path / "run"), "--set", f'tasks.source="{tmp_path}/none"']
    assert main(run) == 2
    assert f"tasks.source: {tmp_path}/none is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["cut off", "no head", "longer"])
def test_weights_that_were_cut_off_are_named_before_anything_starts(tmp_path: Path, damage: str) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(policy_folder(), policy)
    weights = policy / "model.safetensors"
    whole = weights.read_bytes()
    prepare.policy(Config(policy=Policy(path=str(policy))))
    weights.write_bytes({"cut off": whole[:-1], "no head": whole[:5], "longer": whole + b"x"}[damage])
    with pytest.raises(ConfigError, match=r"policy.path: .*model.safetensors .*copy it again"):
        prepare.policy(Config(policy=Policy(path=str(policy))))


async def test_what_this_kind_of_sandbox_cant_carry_out_is_refused_before_the_run(tmp_path: Path) -> None:
    source = copy_of_starters(tmp_path)
    toml = next(source.glob("*/task.toml"))
    toml.write_text(toml.read_text().replace('network_mode = "no-network"', 'network_mode = "public"'))
    with pytest.raises(TaskError, match=r"environment\.network_mode.+docker"):
        await prepare.tasks(folder_with(tmp_path, source=str(source)), print)


async def test_s4_steps_need_a_session_that_branches(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("a", "b"):
        shutil.copytree(ROOT / "tests" / "fixtures" / "tasks" / "steps", source / name)
    folder = RunDir(tmp_path / "run")
    tasks = Tasks(groups_per_step=2, source=str(source), eval_pool=0, qualify=False)
    folder.create(Config(tasks=tasks, sessions=Sessions(divergence="reject")))
    with pytest.raises(ConfigError, match=r"sessions\.divergence"):
        await prepare.tasks(folder, print)
