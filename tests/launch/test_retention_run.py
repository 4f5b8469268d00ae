"""A run that was interrupted, pruned to its newest step and resumed ends as if nothing had happened; one that goes on can be pruned."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from rl360.audit import audit
from rl360.bus import events as ev
from rl360.bus.blobs import BlobStore
from rl360.launch.journal_files import open_source
from tests.launch.run_process import ROOT, SMALL, RunProcess, leftovers, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
OVERRIDES = (*SMALL, "run.steps=8", "run.schedule=one_step")


async def rl360(*arguments: object) -> str:
    """Output of a command that succeeds."""
    command = [sys.executable, "-m", "rl360", *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, out.decode()
    return out.decode()


async def trained(run: RunProcess, step: int) -> None:
    """Wait until a step is trained."""
    async with run.bus() as bus, bus.reader(types=[ev.StepTrained]) as reader:
        while (record := await reader.next(90)) and record.event.step < step:
            pass
        assert record is not None


async def test_prune_under_way_and_after_an_interrupt_takes_nothing_that_a_resume_needs(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with running(path, "recipes/tiny.toml", "--dir", str(path), overrides=OVERRIDES) as run:
        await trained(run, 3)  # which trains on version 3 and may have tokens of 2: version 1 can go
        following = asyncio.create_task(rl360("journal", "tail", path, "--follow", "--type", "StepTrained", "--type", "RunFinished"))
        assert "pruned steps 0 to" in await rl360("journal", "prune", path, "--keep-steps", 1)
        await trained(run, 4)
        run.interrupt()
        assert await run.ended(60) == 130
    assert "RunFinished" in await following
    before = {p.name for p in (path / "checkpoints").iterdir()}
    await rl360("journal", "prune", path, "--keep-steps", 1)
    assert {p.name for p in (path / "checkpoints").iterdir()} < before
    async with running(path, "--resume", str(path), overrides=()) as resumed:
        assert await resumed.ended(200) == 0, resumed.output.decode()
    assert "not held" not in (path / "logs" / "trainer0.log").read_text(), "the trainer recalled every version that it may need"
    async with open_source(path) as source:
        journal = await source.read()
    assert audit(journal, BlobStore(path / "blobs")) == []
    assert [r.event.step for r in journal.records if isinstance(r.event, ev.StepTrained)] == list(range(8))
    assert leftovers(path) == []
