"""A run that is over is read by whoever asks, at once if need be, and never through two servers over one store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl360.bus import events as ev
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus
from rl360.bus.connection import BusError
from rl360.config import ConfigError
from rl360.launch import stored
from rl360.launch.journal_files import open_source
from rl360.launch.rundir import RunDir
from rl360.launch.stored import StoreLock, served
from tests.journal.runs import config, lay_down, play


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    return await lay_down(play(tmp_path / "world"), tmp_path / "run")


async def test_all_of_a_run_or_what_a_step_needs_of_it(folder: Path) -> None:
    async with open_source(folder) as source:
        everything = await source.records()
        of_step_2 = await source.records({2})
        of_two_steps = await source.records({0, 2})
    assert [r.seq for r in everything] == list(range(1, len(everything) + 1))
    kinds = (ev.StepTrained, ev.WeightsPushed)
    assert [r.seq for r in of_two_steps] == [
        r.seq for r in everything if r.event.step in (-1, 0, 2) or (r.event.step == 1 and isinstance(r.event, kinds))
    ]
    assert of_step_2 == [r for r in everything if r.event.step in (-1, 2) or (r.event.step == 1 and isinstance(r.event, kinds))]


async def test_a_folder_that_was_moved_is_read_where_it_lies(folder: Path) -> None:
    async with open_source(folder) as source:
        before = await source.records()
    moved = folder.rename(folder.with_name("moved"))
    async with open_source(moved) as source:
        assert await source.records() == before


async def test_two_readers_share_one_server_which_outlives_the_first(folder: Path) -> None:
    run = RunDir(folder)
    first, leave = asyncio.Event(), asyncio.Event()

    async def first_reader() -> str:
        async with served(run) as address:
            first.set()
            await leave.wait()
            return address.url

    task = asyncio.create_task(first_reader())
    await first.wait()
    async with served(run) as second_address:
        leave.set()
        async with Bus.connect(second_address, "world", BlobStore(folder / "blobs")) as bus:
            records = [r async for r in bus.replay()]
    assert await task == second_address.url
    assert len(records) > 100


async def test_a_run_does_not_start_its_server_while_somebody_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_START", 0.1)
    async with served(RunDir(folder)):
        with pytest.raises(BusError, match="another process runs the server"):
            await stored.take(StoreLock(RunDir(folder)), folder)


async def test_a_run_that_was_never_started_has_no_journal(tmp_path: Path) -> None:
    RunDir(tmp_path).create(config())
    with pytest.raises(ConfigError, match="never started"):
        async with open_source(tmp_path):
            pass


async def test_a_journal_that_is_not_there_is_refused_with_those_that_are(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"{folder}: no journal is called 'nope'; it holds {config().run.name}.*--into NAME makes a copy"):
        async with open_source(folder, "nope"):
            pass
