"""What is kept of a workdir that an agent filled with what can't be kept: noted, and no failure of the infrastructure (S14)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from rl360.agents import steps
from rl360.agents.artifacts import collect, hand_over
from rl360.agents.sandbox.leases import remove_tree
from rl360.agents.staging import Stage
from rl360.agents.tasks import load_task
from tests.agents.harbor import make_task

TASKS = Path(__file__).parent.parent / "fixtures" / "tasks"


def test_s14_what_an_agent_made_unreadable_or_unnameable_is_left_out_and_noted(tmp_path: Path) -> None:
    """Bytes that are no text, a path longer than the kernel takes, a pipe, a socket: none of it is a failure."""
    app = tmp_path / "app"
    (app / "out").mkdir(parents=True)
    (app / "out" / "good").write_text("mine")
    for name in (b"\xff\xfe", b"new\nline", b"n" * 255):
        (app / "out" / os.fsdecode(name)).write_text("x")
    os.mkfifo(app / "out" / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(app / "out" / "s"))
    folders = "$(printf '%0250d/' $(seq 12))"
    deep = f"mkdir -p {folders} && cd {folders} && mkdir -p {folders}"
    subprocess.run(["bash", "-c", deep], cwd=app / "out", check=False)
    task = make_task(tmp_path / "t", toml='artifacts = ["/app/out"]\n')
    try:
        noted = {e.path.removeprefix("app/out/"): e.refused for e in collect(app, task, tmp_path / "kept")}
    finally:
        remove_tree(app)
    assert {name for name, refused in noted.items() if not refused} == {"good", "\\xff\\xfe", "new\nline", "n" * 255}
    assert noted["pipe"] == noted["s"] == "a device, a pipe or a socket"
    assert any("more than 1024 bytes" in why for why in noted.values())
    assert len(json.loads((tmp_path / "kept/manifest.json").read_bytes())) == len(noted)


@pytest.mark.parametrize("left", ["", "mkdir out", "mkdir -p out/deep/er", "touch out", "ln -s / out"])
def test_s14_artifacts_that_are_missing_or_of_another_kind_are_handed_over_as_nothing(tmp_path: Path, left: str) -> None:
    for name in ("app", "into"):
        (tmp_path / name).mkdir()
    subprocess.run(["bash", "-c", left], cwd=tmp_path / "app", check=True)
    task = make_task(tmp_path / "t", toml='artifacts = ["/app/out/deep/er", "/app/out"]\n')
    hand_over(tmp_path / "app", task, tmp_path / "into")
    collect(tmp_path / "app", task, tmp_path / "kept")


def test_s14_two_artifacts_in_one_place_are_no_failure(tmp_path: Path) -> None:
    app = tmp_path / "app"
    (app / "b").mkdir(parents=True)
    (app / "a").write_text("a file where a folder is wanted")
    (app / "b" / "c").write_text("x")
    places = {"/app/a": "x", "/app/b/c": "x/y", "/app/b": "x"}
    entries = ", ".join(f'{{source = "{source}", destination = "{to}"}}' for source, to in places.items())
    noted = collect(app, make_task(tmp_path / "t", toml=f"artifacts = [{entries}]\n"), tmp_path / "kept")
    way = "another artifact lies in its way"
    assert [(e.path, e.refused) for e in noted] == [("x", ""), ("x/y", way), ("x", way)]


def test_what_a_step_leaves_is_bounded_in_all_holes_included(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hole is small enough by itself; together they would fill the disk of the runner."""
    monkeypatch.setattr(steps, "MAX_BYTES", 1 << 20)
    (tmp_path / "w").mkdir()
    for number in range(5):
        with (tmp_path / "w" / f"{number}").open("wb") as file:
            file.truncate(400 << 10)
    task = load_task(TASKS / "steps")
    walk = steps.Walk(task, Stage(tmp_path / "stage").get(task), tmp_path / "scratch")
    walk.leave(tmp_path / "w")
    assert len([p for p in (tmp_path / "scratch").rglob("*") if p.is_file()]) == 2
