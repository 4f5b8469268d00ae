"""What the trainer's ranks leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rl360.trainer.crew_thread import meeting_place


def test_a_killed_trainer_leaves_nothing_outside_its_run_and_the_next_one_removes_it(tmp_path: Path) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )  # a process id that was some trainer's
    left = tmp_path / "ranks" / str(killed.pid)
    left.mkdir(parents=True)
    (left / "meeting").write_text("x")
    meeting_place(tmp_path)
    assert left.exists(), "a trainer that lives keeps its own"
    killed.kill()
    killed.wait(10)
    mine = meeting_place(tmp_path)
    assert [p.name for p in (tmp_path / "ranks").iterdir()] == [mine.name] == [str(os.getpid())]
    (mine / "meeting").write_text("x")
    assert not list(meeting_place(tmp_path).iterdir()), "a process id that came again starts empty"
