"""`rl360 tasks lint` and `rl360 tasks qualify`: what they print. Results go to stdout, progress to stderr."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rl360.agents.lint import Finding, lint
from rl360.agents.qualify import Qualification, qualifications
from rl360.agents.tasks import Task, TaskError, load_task
from rl360.config import Config, ConfigError, load, override, parse

INTERRUPTED = 130
_ALL_BELOW = 20  # tasks: so few are told with every warning


def folders(root: Path) -> tuple[Path, ...]:
    """Every folder with a task.toml. Raises TaskError when there is none."""
    found = tuple(sorted(toml.parent for toml in root.rglob("task.toml")))
    if not found:
        raise TaskError(f"{root}: no task.toml below it; a folder of tasks has one folder a task, each with a task.toml")
    return found


def usable(root: Path, kind: str) -> tuple[list[Task], dict[Path, str]]:
    """The tasks that this kind of sandbox can carry out, and why the others can't be used."""
    tasks: list[Task] = []
    refused: dict[Path, str] = {}
    for folder in folders(root):
        errors = [finding.message for finding in lint(folder, kind) if finding.level == "error"]
        if errors:
            refused[folder] = "; ".join(errors)
        else:
            tasks.append(load_task(folder))
    return tasks, refused


def recipe_of(recipe: Path | None, overrides: Sequence[str]) -> Config:
    if recipe is not None:
        return load(recipe, tuple(overrides))
    data: dict[str, object] = {}
    for item in overrides:
        override(data, item)
    return parse(data)


def lint_tasks(root: Path, kind: str, *, as_json: bool) -> int:
    """Print the findings; 1 when a task can't be used."""
    found = {folder: lint(folder, kind) for folder in folders(root)}
    refused = sum(any(f.level == "error" for f in findings) for findings in found.values())
    if as_json:
        rows = [{"task": str(folder), "level": f.level, "rule": f.rule, "message": f.message} for folder, fs in found.items() for f in fs]
        print(json.dumps({"tasks": len(found), "refused": refused, "sandbox": kind, "findings": rows}))
    else:
        for finding in (f for fs in found.values() for f in fs if f.level == "error" or len(found) <= _ALL_BELOW):
            print(f"{finding.level}: {finding.message}")
        print(*_table(tuple(found.values())), sep="\n")
        print(f"{len(found)} tasks, {refused} refused for sandbox.kind = {kind!r}")
    return 1 if refused else 0


def _table(found: Sequence[Sequence[Finding]]) -> list[str]:
    """How many tasks each rule was found in, refusals first."""
    counts = Counter(key for findings in found for key in {(f.level, f.rule) for f in findings})
    rows = [f"{n:>7}  {level:<7}  {rule}" for (level, rule), n in sorted(counts.items(), key=lambda kv: (kv[0][0], -kv[1], kv[0][1]))]
    return [f"{'tasks':>7}  {'level':<7}  rule", *rows] if rows else []


def qualify_tasks(root: Path, recipe: Path | None, overrides: Sequence[str], cache: Path, *, as_json: bool) -> int:
    """Print what the no-op and the oracle got; 1 when a task doesn't qualify, 130 when it was interrupted."""
    config = recipe_of(recipe, overrides)
    tasks, refused = usable(root, config.sandbox.kind)
    results = [Qualification(task=str(folder), digest="", noop=None, oracle=None, problem=why) for folder, why in refused.items()]
    interrupted = False

    def took(result: Qualification) -> None:
        results.append(result)
        print(f"{len(results)}/{len(tasks) + len(refused)} {result.task}", file=sys.stderr)

    try:
        qualifications(tasks, sandboxes=cache / "sandboxes", cache=cache / "qualified" / config.sandbox.kind, config=config, each=took)
    except KeyboardInterrupt:
        interrupted = True
    problems = sum(bool(result.problem) for result in results)
    if as_json:
        print(json.dumps({"interrupted": interrupted, "results": [msgspec.to_builtins(r) for r in results]}))
    else:
        print(f"{'no-op':>7} {'oracle':>7}  task")
        print(*(f"{_cell(r.noop):>7} {_cell(r.oracle):>7}  {r.task}{f': {r.problem}' if r.problem else ''}" for r in results), sep="\n")
        print(f"{len(results) - problems} of {len(tasks) + len(refused)} tasks qualify")
        if interrupted:
            print(f"interrupted: what qualified is kept in {cache}, and the same command goes on from there")
    return INTERRUPTED if interrupted else 1 if problems else 0


def _cell(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"


def chosen(root: Path, config: Config) -> list[Task]:
    """The usable tasks, the others told. Raises ConfigError when none is left, TaskError for two of one name."""
    tasks, refused = usable(root, config.sandbox.kind)
    for folder, why in refused.items():
        print(f"left out: {folder}: {why}", file=sys.stderr)
    if not tasks:
        raise ConfigError(f"{root}: none of its {len(refused)} tasks can be used; rl360 tasks lint {root} tells why")
    return tasks
