"""A process that lives on and does nothing is found by its silence, recorded and replaced; a run outlives its terminal in order."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.bus import events as ev
from rl360.child import Child
from rl360.launch.hang_watch import GAP, HangWatch, Pulse
from rl360.launch.journal_files import records
from rl360.launch.pulse import FOLDER, HangCare, beat
from tests.launch.run_process import SMALL, nothing_left, running
from tests.launch.test_run import RECIPE, whole


def silent_after(watch: HangWatch, pulse: Pulse, seconds: int, start: float = 1000.0) -> dict[str, str]:
    """What the last of one look a second says."""
    found: dict[str, str] = {}
    for second in range(seconds + 1):
        found = watch.silent(start + second, {"trainer0": pulse})
    return found


def test_silence_of_hang_seconds_ends_a_process() -> None:
    assert silent_after(HangWatch(20.0), Pulse(7, 1.0), 20) == {}
    assert "supervise.hang_seconds" in silent_after(HangWatch(20.0), Pulse(7, 1.0), 21)["trainer0"]


def test_a_process_that_still_loads_has_until_its_start_is_over() -> None:
    assert silent_after(HangWatch(20.0, start_seconds=60.0), Pulse(7, 0.0), 60) == {}
    assert "since its start" in silent_after(HangWatch(20.0, start_seconds=60.0), Pulse(7, 0.0), 61)["trainer0"]


def test_a_new_process_starts_anew() -> None:
    watch = HangWatch(20.0)
    assert silent_after(watch, Pulse(7, 1.0), 19) == {}
    assert silent_after(watch, Pulse(8, 1.0), 19, start=1020.0) == {}


def test_time_in_which_the_supervisor_itself_stood_still_is_no_silence() -> None:
    watch = HangWatch(20.0)
    assert silent_after(watch, Pulse(7, 1.0), 15) == {}
    assert silent_after(watch, Pulse(7, 1.0), 15, start=1015.0 + GAP + 1) == {}


@given(st.lists(st.floats(0.5, 4.0), max_size=60))
def test_whoever_gives_a_sign_of_life_between_any_two_looks_is_never_ended(gaps: list[float]) -> None:
    watch, now = HangWatch(5.0), 1000.0
    for number, gap in enumerate(gaps, start=1):
        now += gap
        assert watch.silent(now, {"trainer0": Pulse(7, float(number))}) == {}


async def test_a_worker_that_is_stopped_is_killed_and_one_that_works_is_not(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    told: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    children = {name: Child(name, ["cat", "/dev/zero"], Path("/dev/null")) for name in ("works", "hangs")}
    care = HangCare(tmp_path, children, {}, 2.0, lambda name, why: told.set_result((name, why)))
    for child in children.values():
        await child.start()
    beats = [asyncio.create_task(beat(tmp_path / FOLDER / name)) for name in children]
    task = asyncio.create_task(care.run())
    try:
        async with asyncio.timeout(30):
            while not (tmp_path / FOLDER / "hangs").exists():
                await asyncio.sleep(0)
            beats[1].cancel()
            name, why = await told
            assert name == "hangs" and "no sign of life for 2 s" in why
            assert await children["hangs"].wait() == -signal.SIGKILL
        assert children["works"].pid
    finally:
        for each in (task, *beats):
            each.cancel()
        for child in children.values():
            await child.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_workers_and_servers_that_are_stopped_are_found_recorded_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run"
    overrides = (*SMALL, "run.steps=4", "supervise.hang_seconds=6.0")
    async with running(path, RECIPE, "--dir", str(path), overrides=overrides) as run:
        for stopped in (("trainer0", "session0", "scheduler0", "gateway"), ("nats-server",)):
            async with run.bus() as bus, bus.reader(types=[ev.StepTrained], start=await bus.last_seq() + 1) as reader:
                assert await reader.next(90) is not None
                for worker in stopped:
                    os.kill(run.pid_of(worker), signal.SIGSTOP)
        assert await run.ended(150) == 0, run.output.decode()
    text, restarts = run.output.decode(), [r.event for r in await records(path) if isinstance(r.event, ev.WorkerRestarted)]
    for worker in ("trainer0", "session0", "scheduler0", "gateway", "nats-server"):
        assert f"{worker}: it hangs: no sign of life for 6 s (supervise.hang_seconds): it is killed" in text
        assert (worker, True) in [(r.worker, "it hangs" in r.cause) for r in restarts]
    await whole(path, 4)


@pytest.mark.slow
async def test_a_run_that_is_ended_while_it_qualifies_tasks_says_how_to_go_on_and_goes_on(tmp_path: Path) -> None:
    path, arguments = tmp_path / "run", (RECIPE, "--dir")
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 128 + signal.SIGINT)):
        overrides = (*SMALL, "run.steps=1", "tasks.qualify=true", "tasks.pool=16") if number is signal.SIGKILL else ()
        async with running(path, *arguments, str(path), overrides=overrides) as run:
            async with asyncio.timeout(60):
                while not list((path / "sandboxes").glob(f"qualify-{run.process.pid}-*")):
                    await asyncio.sleep(0.02)
            run.process.send_signal(number)
            assert await run.ended(20) == status
        said = run.output.decode()
        assert "Traceback" not in said and (number is signal.SIGKILL or f"go on with: rl360 run --resume {path}" in said)
        await nothing_left(path)
        arguments = ("--resume",)
    async with running(path, "--resume", str(path), overrides=()) as resumed:
        assert await resumed.ended(120) == 0, resumed.output.decode()
    assert not list((path / "sandboxes").iterdir())
    await whole(path, 1)
