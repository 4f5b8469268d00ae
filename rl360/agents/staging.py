"""A copy of each task that a runner uses, checked against the digest: what was admitted is what runs.

The copy is readable by any sandbox's uid and nothing writes to it; sandboxes get their files from it.
"""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rl360.agents.tasks import NOT_COPIED, Task, TaskError, digest_of_folder

_PAGE: Final = 4096


@dataclass(frozen=True)
class Staged:
    """Folders of one task's copy. `environment` has what is copied into the workdir, of `size` bytes in memory; None: nothing is."""

    environment: Path | None
    tests: Path
    solution: Path | None
    size: int = 0
    image: Path | None = None  # the folder that an image is built from, with its Dockerfile
    steps: tuple[Staged, ...] = ()  # one a step; their `environment` is what a step adds to the workdir


class Stage:
    """Copies under one folder, one a digest. Safe for many threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._staged: dict[str, Staged] = {}

    def get(self, task: Task) -> Staged:
        """The copy of a task. Raises TaskError when its folder changed since its digest was taken."""
        with self._lock:
            if task.digest not in self._staged:
                self._staged[task.digest] = self._copy(task)
            return self._staged[task.digest]

    def _copy(self, task: Task) -> Staged:
        copy = self._root / task.digest
        shutil.copytree(task.dir, copy, symlinks=True)
        if digest_of_folder(copy) != task.digest:
            shutil.rmtree(copy)
            raise TaskError(f"{task.dir}: changed since its digest was taken; restore it as it was when the step opened")
        image = _build_folder(copy / "environment", copy / "image")
        for name in NOT_COPIED:
            (copy / "environment" / name).unlink(missing_ok=True)
        _make_readable(copy)
        environment, solution = copy / "environment", copy / "solution"
        size = size_of(environment) if task.files else 0
        steps = tuple(_step(copy, step.step) for step in task.steps)
        return Staged(environment if task.files else None, copy / "tests", solution if task.oracle else None, size, image, steps)


def _step(copy: Path, name: str) -> Staged:
    """The files of one step: its tests over those that all steps share, its solution, and what it adds to the workdir."""
    folder = copy / "steps" / name
    tests = copy / "step-tests" / name
    for source in (copy / "tests", folder / "tests"):
        if source.is_dir():
            shutil.copytree(source, tests, symlinks=True, dirs_exist_ok=True)
    tests.parent.chmod(0o755)
    added, solution = folder / "workdir", folder / "solution"
    return Staged(added if added.is_dir() else None, tests, solution if solution.is_dir() else None, size_of(added))


def _build_folder(environment: Path, to: Path) -> Path | None:
    """`environment` as it stands, under further names of its files; None without a Dockerfile."""
    if not (environment / "Dockerfile").is_file():
        return None
    shutil.copytree(environment, to, symlinks=True, copy_function=os.link)
    return to


def size_of(folder: Path) -> int:
    """Bytes that a copy takes on a file system of 4 KiB pages, folders and links among them."""
    return sum(-(-(path.lstat().st_size or 1) // _PAGE) * _PAGE for path in folder.rglob("*"))


def _make_readable(folder: Path) -> None:
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
