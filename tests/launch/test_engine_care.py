"""Engines that are of no use are ended, those that a fault names are struck once (CASES 32, 33)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.bus import events as ev
from rl360.config import ConfigError, Fault, parse
from rl360.launch.engine_faults import EngineFaults
from rl360.launch.engine_watch import GOODBYE, EngineWatch, Process
from tests.launch.run_process import SMALL, running
from tests.launch.story import events
from tests.launch.test_run import RECIPE, whole

URL = "http://127.0.0.1:1"


def joined(pid: int, generation: str = "engine0-a") -> ev.EngineJoined:
    return ev.EngineJoined(run="r", generation=generation, url=URL, pid=pid)


def lost(generation: str = "engine0-a") -> ev.EngineLost:
    return ev.EngineLost(run="r", generation=generation, cause="no lease for 5.1 s")


def test_a_generation_that_was_given_up_and_lives_on_is_ended() -> None:
    watch, engines = EngineWatch(60.0), {"engine0": Process(7, 100.0)}
    watch.on(joined(7), 103.0)
    assert watch.useless(1000.0, engines) == {}
    watch.on(lost(), 1000.0)
    assert watch.useless(1000.0 + GOODBYE, engines) == {}, "it has a moment to end by itself"
    assert "no lease for 5.1 s" in watch.useless(1000.1 + GOODBYE, engines)["engine0"]


def test_a_process_with_the_number_of_an_older_one_is_left_alone() -> None:
    watch = EngineWatch(60.0)
    watch.on(joined(7), 103.0)
    watch.on(lost(), 110.0)
    assert watch.useless(200.0, {"engine0": Process(7, 190.0)}) == {}
    watch.on(joined(7, "engine0-b"), 195.0)
    assert watch.useless(500.0, {"engine0": Process(7, 190.0)}) == {}


def test_an_engine_that_never_joins_is_ended() -> None:
    watch, engines = EngineWatch(60.0), {"engine0": Process(7, 100.0)}
    assert watch.useless(160.0, engines) == {}
    assert "engine.start_seconds" in watch.useless(160.1, engines)["engine0"]


def test_an_engine_fault_strikes_once_when_its_step_has_an_outcome() -> None:
    plan = [Fault(step=0, kind="engine_kill"), Fault(step=1, kind="engine_hang"), Fault(step=0, kind="sandbox_kill")]
    faults = EngineFaults("r", plan, seed=0, engines=["engine0", "engine1"])
    outcome = next(e for e in events() if isinstance(e, ev.VerifierResult))
    assert faults.due() == []
    faults.on(outcome)
    due = faults.due()
    assert [(f.fault, f.kind, f.target) for f in due] == [(0, "engine_kill", "engine0"), (0, "engine_kill", "engine1")]
    for fault in due:
        faults.on(fault)
    assert faults.due() == [] and faults.pending
    resumed = EngineFaults("r", plan, seed=0, engines=["engine0", "engine1"])
    for event in (outcome, *due):
        resumed.on(event)
    assert resumed.due() == []


def test_more_healthy_engines_than_engines_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.min_healthy: must not exceed engine.count \(1\)"):
        parse({"engine": {"min_healthy": 2}})


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_cases_33_a_killed_and_a_hung_engine_are_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    path, faults = tmp_path / "run", '[{step=0,kind="engine_kill"},{step=1,kind="engine_hang"}]'
    overrides = (*SMALL, "run.steps=3", "engine.lease_seconds=2.0", f"faults={faults}")
    async with running(path, RECIPE, "--dir", str(path), overrides=overrides) as run:
        assert await run.ended(250) == 0, run.output.decode()
    text = run.output.decode()
    assert "warning: the recipe has a fault plan" in text
    assert "was given up" in text and "engine0 ended (killed by signal 9): restart 2 of 8" in text
    records = await whole(path, 3)
    injected = [(r.event.step, r.event.kind, r.event.target) for r in records if isinstance(r.event, ev.FaultInjected)]
    assert injected == [(0, "engine_kill", "engine0"), (1, "engine_hang", "engine0")]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_cases_32_a_run_goes_on_without_an_engine_down_to_the_minimum(tmp_path: Path) -> None:
    path = tmp_path / "run"
    overrides = (*SMALL, "run.steps=3", "engine.count=2", "supervise.max_restarts=1")
    async with running(path, RECIPE, "--dir", str(path), overrides=overrides) as run:
        async with run.bus() as bus, bus.reader(types=[ev.EngineJoined, ev.WorkerGivenUp]) as reader:
            lives = 0
            while lives < 2:
                record = await reader.next(60)
                assert record is not None
                if isinstance(record.event, ev.EngineJoined) and record.event.generation.startswith("engine1"):
                    run.kill("engine1")
                    lives += 1
            while not isinstance((record := await reader.next(60)) and record.event, ev.WorkerGivenUp):
                assert record is not None
        assert await run.ended(200) == 0, run.output.decode()
    assert "engine1 ended 2 times (status -9): it is given up, 1 of 2 engines are left (engine.min_healthy 1)" in run.output.decode()
    await whole(path, 3)
