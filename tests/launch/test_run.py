"""A whole run as a user starts it: it learns nothing here, it must end, be whole, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from rl360.audit import audit
from rl360.bus import events as ev
from rl360.bus.blobs import BlobStore
from rl360.bus.codec import Recorded
from rl360.journal.source import Reading
from rl360.launch import journal_files
from tests.launch.run_process import SMALL, RunProcess, leftovers, nothing_left, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
RECIPE = "recipes/tiny.toml"


def terminal_outcomes(records: list[Recorded]) -> Counter[str]:
    return Counter(r.event.attempt for r in records if isinstance(r.event, ev.VerifierResult | ev.InfraFailed))


async def whole(path: Path, steps: int) -> list[Recorded]:
    """The journal of a run that ended: every requested attempt ended once, audit clean, nothing left behind."""
    records = await journal_files.records(path)
    requested = {r.event.attempt for r in records if isinstance(r.event, ev.RolloutRequested)}
    late = {r.event.attempt for r in records if isinstance(r.event, ev.LateOutcome)}
    outcomes = terminal_outcomes(records)
    assert set(outcomes) == requested
    assert {a for a, n in outcomes.items() if n > 1} <= late
    assert audit(Reading(records), BlobStore(path / "blobs")) == []
    assert [r.event.step for r in records if isinstance(r.event, ev.StepTrained)] == list(range(steps))
    assert leftovers(path) == []
    return records


async def kill_at(run: RunProcess, plan: list[tuple[str, int, type[ev.Event], int]]) -> None:
    """kill -9 each worker of the plan when the n-th event of a type of a step is in the journal."""
    due = list(plan)
    async with run.bus() as bus, bus.reader() as reader:
        counts: Counter[tuple[int, type[ev.Event]]] = Counter()
        while due:
            record = await reader.next(60)
            assert record is not None, f"nothing happened for 60 s before {due[0]}"
            kind = type(record.event)
            counts[record.event.step, kind] += 1
            for item in [d for d in due if d[1] == record.event.step and d[2] is kind and counts[d[1], kind] == d[3]]:
                run.kill(item[0])
                due.remove(item)


async def test_a_run_ends_whole_and_says_where_to_look(tmp_path: Path) -> None:
    path = tmp_path / "run"
    overrides = (*SMALL, "run.steps=2", "tasks.eval_every=1", "run.schedule=one_step")
    async with running(path, RECIPE, "--dir", str(path), overrides=overrides) as run:
        status = await run.ended(200)
    text = run.output.decode()
    assert status == 0, text
    assert "step   1  reward/valid_mean" in text and "eval/valid_mean" in text and f"rl360 audit {path}" in text
    assert (path / "reward.svg").stat().st_size > 1000
    records = await whole(path, 2)
    trained = [r.event for r in records if isinstance(r.event, ev.StepTrained) and not r.event.skipped]
    assert all(t.metrics["logp/delta_max"] < 1e-4 and t.metrics["logp/delta_mean"] < 1e-6 for t in trained)


KILLS = [
    ("runner0", 0, ev.TurnCompleted, 6),
    ("merger0", 0, ev.TrajectoryMerged, 2),
    ("session0", 1, ev.TurnCompleted, 6),
    ("filter0", 1, ev.GroupDecided, 1),
    ("gateway", 2, ev.TurnCompleted, 6),
    ("trainer0", 2, ev.GroupDecided, 4),
    ("scheduler0", 3, ev.RolloutAdmitted, 3),
    ("engine0", 3, ev.TurnCompleted, 6),
    ("membership0", 4, ev.TurnCompleted, 6),
    ("nats-server", 4, ev.TurnCompleted, 9),
    ("nats-server", 5, ev.GroupDecided, 2),
]


async def test_kill_9_of_any_worker_loses_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with running(path, RECIPE, "--dir", str(path), overrides=(*SMALL, "run.steps=6")) as run:
        await kill_at(run, KILLS)
        status = await run.ended(240)
    text = run.output.decode()
    assert status == 0, text
    for worker, times in Counter(w for w, *_ in KILLS).items():
        assert f"{worker} ended (killed by signal 9): restart {times} of 8" in text
    await whole(path, 6)


async def test_cases_32_an_engine_that_keeps_dying_stops_the_run_with_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "run"
    overrides = (*SMALL, "run.steps=3", "supervise.max_restarts=2")
    async with running(path, RECIPE, "--dir", str(path), overrides=overrides) as run:
        async with run.bus() as bus, bus.reader(types=[ev.EngineJoined]) as reader:
            for _ in range(3):
                assert await reader.next(60) is not None
                run.kill("engine0")
        assert await run.ended(60) == 2
    text = run.output.decode()
    assert "engine0 ended 3 times" in text and "engine0.log" in text
    assert "Traceback" not in text
    assert leftovers(path) == []


async def test_cases_39_a_second_interrupt_kills_all_at_once_and_resume_goes_on(tmp_path: Path) -> None:
    """The resumed one although nobody reads its lines any more."""
    path = tmp_path / "run"
    overrides = (*SMALL, "run.steps=1", "supervise.drain_seconds=300.0")
    async with running(path, RECIPE, "--dir", str(path), overrides=overrides) as run:
        async with run.bus() as bus, bus.reader(types=[ev.TurnCompleted]) as reader:
            assert await reader.next(60) is not None
        os.kill(run.pid_of("scheduler0"), signal.SIGSTOP)  # the drain waits for it
        run.interrupt()
        await run.said("interrupt again to kill")
        run.interrupt()
        assert await run.ended(20) == 130
    await nothing_left(path)
    async with running(path, "--resume", str(path), overrides=()) as resumed:
        assert resumed.process.stdout is not None
        resumed.process.stdout._transport.close()  # type: ignore[attr-defined]
        async with asyncio.timeout(200):
            assert await resumed.process.wait() == 0
    await whole(path, 1)


async def test_a_run_that_is_ended_drains_records_it_and_goes_on_each_time(tmp_path: Path) -> None:
    """By Ctrl-C, by whoever ends services, and with its terminal."""
    path, arguments = tmp_path / "run", (RECIPE, "--dir")
    ends = [(signal.SIGINT, ev.TurnCompleted), (signal.SIGTERM, ev.StepTrained), (signal.SIGHUP, ev.EngineJoined)]
    for number, moment in ends:
        async with running(path, *arguments, str(path), overrides=(*SMALL, "run.steps=4") if number is signal.SIGINT else ()) as run:
            async with run.bus() as bus, bus.reader(types=[moment], start=await bus.last_seq() + 1) as reader:
                assert await reader.next(60) is not None
            run.process.send_signal(number)
            assert await run.ended(60) == 128 + number
        assert f"rl360 run --resume {path}" in run.output.decode()
        assert leftovers(path) == []
        arguments = ("--resume",)
    async with running(path, "--resume", str(path), overrides=()) as resumed:
        assert await resumed.ended(200) == 0, resumed.output.decode()
    records = await whole(path, 4)
    assert [r.event.why for r in records if isinstance(r.event, ev.RunFinished)][:3] == ["interrupted"] * 3
