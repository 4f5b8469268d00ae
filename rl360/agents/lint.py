"""What is worth knowing about a task before it is used: errors that stop it, warnings that explain a failed qualification."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rl360.agents import support, task_file
from rl360.agents.task_file import TaskError, TaskFile
from rl360.agents.tasks import Task, build

_EXITS_EARLY: Final = re.compile(r"^\s*set\s+-\w*e", re.MULTILINE)
_NETWORK: Final = re.compile(r"\b(apt-get|curl|wget|uvx|pip3? install|npm install|git clone)\b")
_BUILD_STEP: Final = re.compile(r"^\s*(RUN|ADD)\s", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """`level` is "error" (the task can't be used) or "warning"; `rule` names the kind of finding: a key, a file, or a word."""

    level: str
    message: str
    rule: str


def lint(folder: Path, kind: str = support.ANY) -> tuple[Finding, ...]:
    """Findings about one task's folder for a kind of sandbox; never raises for what is wrong with the task."""
    toml = folder / "task.toml"
    errors: list[Finding] = []
    try:
        file, unknown = task_file.read(toml)
        errors += [Finding("error", f"{toml}: {r}", _general(r.key, file)) for r in support.refusals(file, kind)]
        task = build(folder, file, unknown)
    except TaskError as e:
        return (*errors, Finding("error", str(e), Path(str(e).partition(": ")[0]).name))
    return (*errors, *(Finding("warning", f"{folder}: {message}", rule) for rule, message in _warnings(task, file, kind)))


def _general(key: str, file: TaskFile) -> str:
    """The key without the names that a task gave: "environment.env.TOKEN" is "environment.env"."""
    for step in file.steps:
        key = key.replace(f"steps.{step.name}", "steps")
    return re.sub(r"\benv\..*", "env", key)


def _warnings(task: Task, file: TaskFile, kind: str) -> Iterator[tuple[str, str]]:
    if not file.schema_version.startswith("1."):
        yield "schema_version", f"task.toml: schema_version {file.schema_version!r} is newer than 1.4; keys of it may have no effect"
    for key in task.unknown_keys:
        yield "unknown key", f"task.toml: unknown key {key!r} has no effect"
    if file.environment.allow_internet and kind != "docker" and file.environment.network_mode is None:
        yield (
            "allow_internet",
            "task.toml: environment.allow_internet: only the Docker sandbox reaches the network; qualify shows who needs it",
        )
    if file.environment.docker_image and kind != "docker":
        yield "docker_image", f"task.toml: environment.docker_image {file.environment.docker_image!r}: only the Docker sandbox runs images"
    dockerfile = task.dir / "environment" / "Dockerfile"
    if kind != "docker" and _BUILD_STEP.search(_text(dockerfile)):
        yield "build steps", "environment/Dockerfile has build steps, which the bwrap sandbox doesn't run"
    if not task.oracle:
        yield "no solution", "solution/solve.sh is missing, so the oracle can't qualify the task"
    for step in task.steps or (task,):
        reaches = kind == "docker" or step.verifier_network.filtered
        yield from _test_warnings(task.dir / "steps" / step.step if step.step else task.dir, task.dir, reaches)


def _test_warnings(folder: Path, whole: Path, reaches: bool) -> Iterator[tuple[str, str]]:
    path = next(p for p in (folder / "tests" / "test.sh", whole / "tests" / "test.sh") if p.is_file())
    name, test = path.relative_to(whole).as_posix(), _text(path)
    if not os.access(path, os.X_OK):
        yield "no run bit", f"{name} has no run bit; it is run through bash all the same"
    if "reward." not in test:
        yield "no reward named", f"{name} names neither reward.txt nor reward.json; something else must write the reward"
    if _EXITS_EARLY.search(test) and "trap " not in test:
        yield "set -e", f"{name} sets -e without a trap: a failing test ends it before a reward is written, and the attempt has none"
    if not reaches and _NETWORK.search(test):
        yield "verifier network", f"{name} reaches for the network, which this sandbox doesn't have without an allowlist"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
