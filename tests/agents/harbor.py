"""Tasks in Harbor's format, written for a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rl360.agents.tasks import Task, load_task

ANSWER_TEST = 'if [ "$(cat /app/answer.txt 2>/dev/null)" = 42 ]; then r=1; else r=0; fi\necho $r > /logs/verifier/reward.txt\n'


def write_task(
    folder: Path,
    *,
    test: str = ANSWER_TEST,
    toml: str = "",
    instruction: str = "Write 42 to answer.txt",
    files: Mapping[str, str] | None = None,
    solution: str | None = "echo 42 > /app/answer.txt\n",
) -> Path:
    for name, text in {
        "task.toml": f'schema_version = "1.4"\n{toml}',
        "instruction.md": instruction,
        "tests/test.sh": test,
        "environment/Dockerfile": "FROM debian\nCOPY . /app/\n",
        **({"solution/solve.sh": solution} if solution is not None else {}),
        **{f"environment/{n}": t for n, t in (files or {"notes.txt": "hello\n"}).items()},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def make_task(folder: Path, **parts: object) -> Task:
    return load_task(write_task(folder, **parts))  # type: ignore[arg-type]
