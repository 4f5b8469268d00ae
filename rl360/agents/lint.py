"""What is worth knowing about a task before it is used: errors that stop it, warnings that explain a failed qualification."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rl360.agents.task_file import TaskError
from rl360.agents.tasks import Task, load_task

_EXITS_EARLY: Final = re.compile(r"^\s*set\s+-\w*e", re.MULTILINE)
_NETWORK: Final = re.compile(r"\b(apt-get|curl|wget|uvx|pip3? install|npm install|git clone)\b")
_BUILD_STEP: Final = re.compile(r"^\s*(RUN|ADD)\s", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """`level` is "error" (the task can't be used) or "warning"."""

    level: str
    message: str


def lint(folder: Path) -> tuple[Finding, ...]:
    """Findings about one task's folder; never raises for what is wrong with the task."""
    try:
        task = load_task(folder)
    except TaskError as e:
        return (Finding("error", str(e)),)
    return tuple(Finding("warning", f"{folder}: {message}") for message in _warnings(task))


def _warnings(task: Task) -> list[str]:
    test = (task.dir / "tests" / "test.sh").read_text(encoding="utf-8", errors="replace")
    dockerfile = task.dir / "environment" / "Dockerfile"
    recipe = dockerfile.read_text(encoding="utf-8", errors="replace") if dockerfile.is_file() else ""
    checks = (
        (not os.access(task.dir / "tests" / "test.sh", os.X_OK), "tests/test.sh has no run bit; it is run through bash all the same"),
        ("reward." not in test, "tests/test.sh names neither reward.txt nor reward.json; something else must write the reward"),
        (
            bool(_EXITS_EARLY.search(test)) and "trap " not in test,
            "tests/test.sh sets -e without a trap: a failing test ends it before a reward is written, and the attempt has none",
        ),
        (bool(_NETWORK.search(test)), "tests/test.sh reaches for the network, which sandboxes don't have"),
        (bool(_BUILD_STEP.search(recipe)), "environment/Dockerfile has build steps, which the bwrap sandbox doesn't run"),
        (not task.oracle, "solution/solve.sh is missing, so the oracle can't qualify the task"),
    )
    unknown = [f"task.toml: unknown key {key!r} has no effect" for key in task.unknown_keys]
    passed = [f"task.toml: {key} = {value!r} is passed as it stands" for key, value in task.env.items() if value.startswith("${")]
    return [*unknown, *passed, *(message for found, message in checks if found)]
