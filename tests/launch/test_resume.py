"""A run that was killed, or whose machine crashed, goes on with what is outstanding: nothing is lost, nothing is done twice (CASES 38)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from rl360.bus import events as ev
from rl360.bus.client import Bus
from rl360.config import Config
from rl360.launch import prepare, resume
from rl360.launch.chaos.victim import copy_store
from rl360.launch.high_water import HighWater, Mark, write
from rl360.launch.rundir import RunDir, port_of
from rl360.trainer.checkpoints import FORMAT, MANIFEST, Manifest, Seen
from tests.launch.run_process import SMALL, RunProcess, running
from tests.launch.test_run import RECIPE, whole

# ------------------------------------------------------------------------------------------------ the journal and its witnesses


@pytest.fixture
async def journal(bus: Bus) -> Bus:
    for step in range(10):
        await bus.publish(ev.StepClosed(run=bus.run, step=step, requested=1, valid=0, masked=0, infra=0, kept=0))
    return bus


async def marks(bus: Bus) -> list[Mark]:
    return [Mark(r.seq, r.time) async for r in bus.replay()]


def checkpoint(root: Path, step: int, seen: Seen | None) -> Path:
    path = root / f"step-{step:06d}"
    path.mkdir(parents=True)
    manifest = Manifest(format=FORMAT, step=step, version=step + 1, event=b"", files={}, seen=seen)
    (path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return path


async def test_a_whole_journal_says_nothing_and_keeps_its_checkpoints(journal: Bus, tmp_path: Path) -> None:
    known = await marks(journal)
    kept = checkpoint(tmp_path, 0, Seen(known[4].seq, known[4].time))
    old = checkpoint(tmp_path, 1, None)
    assert await resume.look(journal, known[-1], tmp_path) is None
    assert await resume.look(journal, None, tmp_path) is None
    assert kept.exists() and old.exists()


async def test_a_journal_shorter_than_the_mark_was_rewound(journal: Bus, tmp_path: Path) -> None:
    last = (await marks(journal))[-1]
    rewound = await resume.look(journal, Mark(last.seq + 5, last.time + 1), tmp_path)
    assert rewound is not None and (rewound.lost, rewound.kept, rewound.checkpoints) == (15, 10, ())


async def test_another_event_under_the_marks_number_is_a_rewound_journal_too(journal: Bus, tmp_path: Path) -> None:
    last = (await marks(journal))[-1]
    assert await resume.look(journal, Mark(last.seq, last.time - 1e-6), tmp_path) is not None


async def test_a_checkpoint_made_from_lost_events_is_set_aside_and_named(journal: Bus, tmp_path: Path) -> None:
    known = await marks(journal)
    kept = checkpoint(tmp_path, 0, Seen(known[4].seq, known[4].time))
    lost = checkpoint(tmp_path, 1, Seen(12, known[-1].time + 1))
    rewound = await resume.look(journal, known[-1], tmp_path)
    assert rewound is not None and (rewound.lost, rewound.kept, rewound.checkpoints) == (12, 10, ("step-000001",))
    assert kept.exists() and not lost.exists() and (tmp_path / "step-000001.rewound-1").exists()
    assert "holds events to 10" in resume.told(rewound) and "set aside: step-000001" in resume.told(rewound)


def test_the_mark_is_what_was_written_last_and_a_torn_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    assert HighWater(path).read() is None
    write(path, Mark(7, 1733160000.123456))
    assert HighWater(path).read() == Mark(7, 1733160000.123456)
    path.write_bytes(b"")
    assert HighWater(path).read() is None


# ------------------------------------------------------------------------------------------------ its folder


def test_a_port_that_somebody_else_has_meanwhile_is_replaced(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.create(Config())
    before = folder.addresses
    assert not folder.renew_addresses() and folder.addresses == before
    with socket.socket() as s:
        s.bind(("127.0.0.1", port_of(before.sessions[0])))
        s.listen()
        assert folder.renew_addresses()
        assert port_of(folder.addresses.sessions[0]) != port_of(before.sessions[0])


def test_tasks_whose_copy_was_cut_off_are_copied_again(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "tasks" / "train"
    (source / "a").mkdir(parents=True)
    (out.parent / "train.tmp" / "half").mkdir(parents=True)
    prepare.copy(source, out)
    assert [p.name for p in out.iterdir()] == ["a"]
    shutil.rmtree(source)
    prepare.copy(source, out)


# ------------------------------------------------------------------------------------------------ whole runs


async def when(run: RunProcess, kind: type[ev.Event], step: int) -> None:
    """Wait until the run recorded such an event of a step."""
    async with run.bus() as bus, bus.reader(types=[kind]) as reader:
        while (record := await reader.next(90)) and record.event.step < step:
            pass
        assert record is not None


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("schedule", ["sync", "one_step"])
async def test_a_machine_crash_that_took_the_journals_end_is_said_and_made_good(tmp_path: Path, schedule: str) -> None:
    path, copy = tmp_path / "run", tmp_path / "older"
    async with running(path, RECIPE, "--dir", str(path), overrides=(*SMALL, "run.steps=4", f"run.schedule={schedule}")) as run:
        await when(run, ev.VerifierResult, 1)
        copy_store(run.pid_of("nats-server"), path / "nats" / "store", copy)
        await when(run, ev.StepTrained, 2)
        os.killpg(run.process.pid, signal.SIGKILL)
        await run.ended(30)
    shutil.rmtree(path / "nats" / "store")
    shutil.copytree(copy, path / "nats" / "store")
    async with running(path, "--resume", str(path), overrides=()) as resumed:
        assert await resumed.ended(240) == 0, resumed.output.decode()
    text = resumed.output.decode()
    assert "warning: the journal lost its end" in text and "journal lost its end  from" in text
    records = await whole(path, 4)
    (rewound,) = [r for r in records if isinstance(r.event, ev.JournalRewound)]
    assert isinstance(rewound.event, ev.JournalRewound)
    assert rewound.event.lost > rewound.event.kept == rewound.seq - 2, "after the start that found it"
    assert {"step-000001", "step-000002"} >= set(rewound.event.checkpoints) >= {"step-000002"}


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_journal_that_is_rewound_under_a_live_run_stops_it_and_resume_goes_on(tmp_path: Path) -> None:
    path, copy = tmp_path / "run", tmp_path / "older"
    overrides = (*SMALL, "run.steps=3", "supervise.drain_seconds=3.0")
    async with running(path, RECIPE, "--dir", str(path), overrides=overrides) as run:
        await when(run, ev.VerifierResult, 0)
        copy_store(run.pid_of("nats-server"), path / "nats" / "store", copy)
        await when(run, ev.VerifierResult, 1)
        store = path / "nats" / "store"
        os.rename(copy, path / "nats" / "older")
        pid = run.pid_of("nats-server")
        os.kill(pid, signal.SIGSTOP)
        os.rename(store, path / "nats" / "newer")
        os.rename(path / "nats" / "older", store)
        os.kill(pid, signal.SIGKILL)
        assert await run.ended(60) == 2
    text = run.output.decode()
    assert "the journal lost its end while nats-server was down" in text and f"rl360 run --resume {path}" in text
    assert "Traceback" not in text
    async with running(path, "--resume", str(path), overrides=()) as resumed:
        assert await resumed.ended(120) == 0, resumed.output.decode()
    await whole(path, 3)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_killed_again_and_again_at_any_moment_it_still_ends_whole(tmp_path: Path) -> None:
    path = tmp_path / "run"
    moments = [
        (ev.RunStarted, -1),
        (ev.RolloutAdmitted, 0),
        (ev.GroupDecided, 0),
        (ev.StepTrained, 0),
        (ev.WeightsPushed, 1),
        (ev.StepClosed, 1),
    ]
    arguments: tuple[str, ...] = (RECIPE, "--dir", str(path))
    for number, (kind, step) in enumerate(moments):
        async with running(path, *arguments, overrides=() if number else (*SMALL, "run.steps=2")) as run:
            await when(run, kind, step)
            os.killpg(run.process.pid, signal.SIGKILL)
            await run.ended(30)
        arguments = ("--resume", str(path))
    async with running(path, *arguments, overrides=()) as run:
        assert await run.ended(120) == 0, run.output.decode()
    records = await whole(path, 2)
    assert sum(isinstance(r.event, ev.RunStarted) for r in records) > 3, "a start may be killed before it is recorded"
