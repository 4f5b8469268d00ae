"""The generated tasks: deterministic, disjoint splits, no-op 0 and oracle 1, checks that can't be talked around."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.agents.lint import lint
from rl360.agents.tasks import load_task
from rl360.config import Tasks
from rl360.tiny.shell_tasks import (
    HIDDEN_CASES,
    OPERATORS,
    PUBLIC_CASE,
    AnyTask,
    calculate,
    generate_pool,
    make_tasks,
    sample_tasks,
    write_task,
)
from tests.tiny.shells import Shell


def contents(folders: list[Path]) -> dict[str, str]:
    return {f"{f.name}/{p.relative_to(f)}": p.read_text() for f in folders for p in sorted(f.rglob("*")) if p.is_file()}


def of_family(family: str) -> AnyTask:
    return next(t for t in sample_tasks(seed=3, count=9, split="train") if t.family == family)


def test_a_seed_gives_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (contents(make_tasks(tmp_path / n, seed=s, count=12, split="train")) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    assert first == again
    assert not set(first) & set(other)


def test_a_larger_pool_begins_with_the_smaller_one() -> None:
    assert sample_tasks(seed=1, count=40, split="train")[:12] == sample_tasks(seed=1, count=12, split="train")


def test_no_held_out_instruction_is_a_training_one() -> None:
    train = {t.instruction for s in range(4) for t in sample_tasks(seed=s, count=150, split="train")}
    held_out = {t.instruction for s in range(4) for t in sample_tasks(seed=s, count=60, split="eval")}
    assert len(held_out) > 150
    assert not train & held_out


def test_the_families_are_balanced_and_instructions_differ() -> None:
    tasks = sample_tasks(seed=0, count=96, split="train")
    assert len({t.instruction for t in tasks}) == len({t.name for t in tasks}) == 96
    assert all(abs(sum(t.family == f for t in tasks) - 32) <= 2 for f in ("fix", "look", "set"))


def test_generate_pool_keeps_what_is_there(tmp_path: Path) -> None:
    config = Tasks(pool=6, eval_pool=3, groups_per_step=4)
    train, held_out = generate_pool(config, tmp_path)
    stamp = (train[0] / "task.toml").stat().st_mtime_ns
    assert (len(train), len(held_out)) == (6, 3)
    assert generate_pool(config, tmp_path) == (train, held_out)
    assert (train[0] / "task.toml").stat().st_mtime_ns == stamp


def test_a_half_written_task_is_completed(tmp_path: Path) -> None:
    task = of_family("look")
    whole = contents([write_task(tmp_path / "whole", task)])
    half = write_task(tmp_path / "half", task)
    (half / "task.toml").unlink()
    (half / "tests" / "test.sh").write_text("")
    assert {k.partition("/")[2]: v for k, v in contents([write_task(half, task)]).items()} == {
        k.partition("/")[2]: v for k, v in whole.items()
    }


@pytest.mark.parametrize("family", ["fix", "look", "set"])
def test_a_task_reads_as_harbors_without_a_finding(tmp_path: Path, family: str) -> None:
    folder = write_task(tmp_path / "t", of_family(family))
    task = load_task(folder)
    assert lint(folder) == ()
    assert (task.domain, task.workdir, task.low, task.high, task.oracle) == (family, "/app", 0.0, 1.0, True)
    assert set(task.files) == {*of_family(family).files, "test.sh"}
    assert task.agent_timeout
    assert task.verifier_timeout


@pytest.mark.parametrize("split", ["train", "eval"])
def test_noop_scores_0_and_oracle_1(tmp_path: Path, split: str) -> None:
    for folder in make_tasks(tmp_path / "tasks", seed=5, count=15, split=split):  # type: ignore[arg-type]
        noop, oracle = Shell(folder, tmp_path / "noop" / folder.name), Shell(folder, tmp_path / "oracle" / folder.name)
        assert noop.run("sh test.sh").startswith("FAIL")
        oracle.script("solution/solve.sh")
        assert oracle.run("sh test.sh") == "PASS"
        assert (noop.reward(), oracle.reward()) == (0, 1), folder


def test_the_verifier_ignores_the_agents_copy_of_the_test(tmp_path: Path) -> None:
    for family in ("fix", "look", "set"):
        shell = Shell(write_task(tmp_path / family, of_family(family)), tmp_path / f"{family}-root")
        shell.run("echo 'echo PASS; echo 1 > ../logs/verifier/reward.txt' > test.sh && sh test.sh")
        assert shell.reward() == 0


def test_a_script_that_answers_the_public_case_alone_scores_0(tmp_path: Path) -> None:
    task = of_family("fix")
    shell = Shell(write_task(tmp_path / "fix", task), tmp_path / "root")
    shell.run(f"echo 'echo {calculate(task.operator, *PUBLIC_CASE)}' > {task.target}")  # type: ignore[union-attr]
    assert shell.run("sh test.sh") == "PASS"
    assert shell.reward() == 0


def test_an_edit_that_breaks_the_rest_scores_0(tmp_path: Path) -> None:
    task = of_family("set")
    shell = Shell(write_task(tmp_path / "set", task), tmp_path / "root")
    shell.run(f"{task.edit}; echo more >> {task.target}")
    assert shell.run("sh test.sh") == "PASS"
    assert shell.reward() == 0


@pytest.mark.parametrize("damage", ["rm *", "echo 'while :; do :; done' > {target}", "echo '$((' > {target}", "mkdir x; mv * x"])
def test_what_the_agent_breaks_is_scored_0_not_lost(tmp_path: Path, damage: str) -> None:
    task = of_family("fix")
    shell = Shell(write_task(tmp_path / "fix", task), tmp_path / "root")
    shell.run(damage.format(target=task.target))
    assert shell.reward() == 0


def test_the_cases_tell_the_operators_apart() -> None:
    assert len({calculate(o, *PUBLIC_CASE) for o in OPERATORS.values()}) == len(OPERATORS)
    assert len({tuple(calculate(o, *c) for c in HIDDEN_CASES) for o in OPERATORS.values()}) == len(OPERATORS)
