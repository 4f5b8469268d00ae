"""`rl360 journal` as a user types it: over a run that is over, its export, and the folder that another user imports that to."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

import pytest

from rl360.bus import events as ev
from rl360.bus.client import Bus
from rl360.cli import main
from rl360.journal import exporting, importing
from rl360.journal.lines import Filter
from rl360.journal.stream import StreamSource
from rl360.launch.journal_commands import coming
from rl360.launch.journal_files import open_source, records
from tests.journal.runs import lay_down, play

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    return asyncio.run(lay_down(play(root / "world", steps=5), root / "run"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def said(capture: Capture, *arguments: object, status: int = 0) -> str:
    assert main([str(a) for a in arguments]) == status
    out = capture.readouterr()
    return out.out if status == 0 else out.err


def test_ls_lists_steps_and_pins(run: Path, capsys: Capture) -> None:
    said(capsys, "journal", "pin", run, "--step", 2)
    text = said(capsys, "journal", "ls", run)
    rows = {row.split()[0]: row for row in text.splitlines()[2:] if row[:6].strip()}
    assert set(rows) >= {"-", "0", "1", "2", "3", "4"}
    assert rows["2"].endswith("pinned") and "GroupDecided" in text
    assert "step 2 is not pinned" in said(capsys, "journal", "unpin", run, "--step", 2)


def test_tail_shows_the_last_events_or_the_chosen_ones(run: Path, capsys: Capture) -> None:
    everything = asyncio.run(records(run))
    text = said(capsys, "journal", "tail", run, "--lines", 5)
    assert [int(row.split()[0]) for row in text.splitlines()] == [r.seq for r in everything[-5:]]
    chosen = said(capsys, "journal", "tail", run, "--attempt", "t1-g000-a0", "--json", "--lines", 100)
    expected = [r.seq for r in everything if getattr(r.event, "attempt", "") == "t1-g000-a0"]
    assert [json.loads(row)["seq"] for row in chosen.splitlines()] == expected
    only = said(capsys, "journal", "tail", run, "--type", "StepTrained", "--type", "StepOpened", "--step", 3, "--lines", 100)
    assert [row.split()[3] for row in only.splitlines()].count("StepTrained") == 1
    assert "not going on" in said(capsys, "journal", "tail", run, "--follow", status=2)


READERS = (
    ["summary", "run"],
    ["trace", "run", "t1-g000-a0"],
    ["audit", "run"],
    ["explain", "run", "--step", "1"],
    ["replay", "run", "--step", "2"],
)


def outputs(folder: Path, prefix: list[str]) -> list[tuple[int, str]]:
    """What each reading command says in `folder`, in processes of their own."""
    command = [*prefix, sys.executable, "-m", "rl360"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(folder), "MPLCONFIGDIR": str(folder)}
    done = [subprocess.run([*command, *r], cwd=folder, env=env, capture_output=True, text=True, timeout=60) for r in READERS]
    return [(d.returncode, d.stdout + d.stderr) for d in done]


NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def test_another_user_on_another_machine_reads_the_same(run: Path, tmp_path: Path, capsys: Capture, tmp_path_factory) -> None:
    """The other machine has no server of the run, another folder, and another user where this one may become one."""
    said(capsys, "journal", "export", run, tmp_path / "run.zip")
    before = outputs(tmp_path, [])
    assert [status for status, _ in before] == [0] * len(READERS), before
    there = tmp_path_factory.mktemp("there")
    shutil.copy(tmp_path / "run.zip", there)
    prefix: list[str] = []
    usable = subprocess.run([*NOBODY, sys.executable, "-c", "import rl360.cli"], cwd="/", env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    if os.getuid() == 0 and usable.returncode == 0:
        prefix = NOBODY
        for path in (there, there / "run.zip"):
            os.chown(path, 65534, 65534)
        for parent in takewhile(lambda p: p != Path(tempfile.gettempdir()), there.parents):
            parent.chmod(0o755)
    imported = subprocess.run(
        [*prefix, sys.executable, "-m", "rl360", "journal", "import", "run.zip", "run"],
        cwd=there,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
    )
    assert imported.returncode == 0, imported.stderr
    assert (there / "run").stat().st_uid == (65534 if prefix else os.getuid())
    assert outputs(there, prefix) == before
    names = {p.name for p in (there / "run").rglob("*")}
    assert "secrets.json" not in names and not [n for n in names if n.endswith(".conf")]


def test_one_step_travels_with_its_checkpoint(run: Path, tmp_path: Path, capsys: Capture) -> None:
    text = said(capsys, "journal", "export", run, tmp_path / "s.zip", "--step", 3, "--with-checkpoint")
    assert "step 3 of run world" in text
    said(capsys, "journal", "import", tmp_path / "s.zip", tmp_path / "there")
    assert sorted(p.name for p in (tmp_path / "there" / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert "of 8 kept samples" in said(capsys, "explain", tmp_path / "there", "--step", 3)
    assert "exported with step 3 alone" in said(capsys, "journal", "ls", tmp_path / "there")
    assert "alone, not 1" in said(capsys, "explain", tmp_path / "there", "--step", 1, status=2)


def test_what_can_not_be_done_is_one_line(run: Path, tmp_path: Path, capsys: Capture) -> None:
    said(capsys, "journal", "export", run, tmp_path / "run.zip")
    said(capsys, "journal", "import", tmp_path / "run.zip", tmp_path / "there")
    assert "no step 77" in said(capsys, "journal", "export", run, tmp_path / "f.zip", "--step", 77, status=2)
    assert "no step 77" in said(capsys, "journal", "pin", run, "--step", 77, status=2)
    assert "not the folder of a run" in said(capsys, "journal", "ls", tmp_path / "nowhere", status=2)
    assert "no such file" in said(capsys, "journal", "import", tmp_path / "none.zip", tmp_path / "x", status=2)
    assert "names look like" in said(capsys, "journal", "tail", run, "--attempt", "x", status=2)
    assert "exists already" in said(capsys, "journal", "export", run, tmp_path / "run.zip", status=2)
    assert "fresh folder" in said(capsys, "journal", "import", tmp_path / "run.zip", run, status=2)
    assert "goes with --step" in said(capsys, "journal", "export", run, tmp_path / "f.zip", "--with-checkpoint", status=2)
    assert "at least the newest" in said(capsys, "journal", "prune", run, "--keep-steps", 0, status=2)
    assert "imported archive" in said(capsys, "journal", "prune", tmp_path / "there", "--keep-steps", 1, status=2)
    assert "imported archive" in said(capsys, "run", "--resume", tmp_path / "there", status=2)


def test_prune_removes_once_says_so_in_the_journal_and_keeps_what_is_pinned(run: Path, tmp_path: Path, capsys: Capture) -> None:
    before = asyncio.run(records(run))
    held = {p.name for p in (run / "blobs").rglob("*") if p.is_file()}
    said(capsys, "journal", "pin", run, "--step", 1)
    text = said(capsys, "journal", "prune", run, "--keep-steps", 1)
    assert "pruned steps 0 to 3 but 1 (pinned)" in text and "events stay" in text
    after = asyncio.run(records(run))
    assert after[:-1] == before
    event = after[-1].event
    assert isinstance(event, ev.BlobsPruned) and event.blobs and event.checkpoints
    left = {p.name for p in (run / "blobs").rglob("*") if p.is_file()}
    assert len(held) - len(left) == event.blobs and left < held
    assert {p.name for p in (run / "checkpoints").iterdir()} == {f"step-{i:06d}" for i in range(5)} - set(event.checkpoints)
    assert "nothing to remove" in said(capsys, "journal", "prune", run, "--keep-steps", 1)
    assert "was pruned already" in said(capsys, "journal", "pin", run, "--step", 0, status=2)
    text = said(capsys, "audit", run)
    assert f"pruned by retention: {event.blobs} blobs of steps 0 to 3 but 1" in text and "clean" in text
    assert "was pruned by retention" in said(capsys, "replay", run, "--step", 0)
    assert "was pruned by retention" not in said(capsys, "replay", run, "--step", 1)
    assert "retention had removed them" in said(capsys, "journal", "export", run, tmp_path / "pruned.zip")
    said(capsys, "journal", "import", tmp_path / "pruned.zip", tmp_path / "there")
    assert said(capsys, "audit", tmp_path / "there") == text


async def test_tail_follows_a_running_run_to_its_end(bus: Bus) -> None:
    source, shown = StreamSource(bus, live=True), list[int]()

    async def publish() -> None:
        for step in range(3):
            await bus.publish(ev.StepOpened(run=bus.run, step=step, version=0, groups=()))
            await bus.publish(ev.EngineLost(run=bus.run, generation=f"e{step}", cause="x"))
        await bus.publish(ev.RunFinished(run=bus.run, why="steps", steps=3))

    await bus.publish(ev.StepOpened(run=bus.run, step=9, version=0, groups=()))
    publishing = asyncio.create_task(publish())
    async with asyncio.timeout(20):
        async for message in coming(source, Filter(types=("StepOpened", "RunFinished")), 2):
            shown.append(message.seq)
    await publishing
    assert shown == [2, 4, 6, 8]


async def test_an_imported_folder_needs_no_server(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_source(run) as source:
        await exporting.write(source, tmp_path / "run.zip", recipe=(run / "recipe.json").read_bytes(), steps=None, folders={})
        original = await source.records()
    importing.lay_down(tmp_path / "run.zip", tmp_path / "there")
    monkeypatch.setattr("rl360.bus.nats_server.binary", lambda: pytest.fail("a server was started"))
    async with open_source(tmp_path / "there") as source:
        assert await source.records() == original
