"""The scheduler and the filter as workers on a real bus: they start a step, and a restart says nothing twice."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from rl360.agents.tasks import TaskError
from rl360.bus import events as ev
from rl360.bus.address import Addresses, Secrets
from rl360.bus.client import Bus
from rl360.bus.worker import WorkerContext
from rl360.config import Config, parse
from rl360.trainer import filter_worker, scheduler_worker
from tests.trainer.world import failed

DEADLINE = 30.0


def write_task(folder: Path, agent_timeout: float) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(f'version = "1.0"\n[metadata]\ncategory = "fix"\n[agent]\ntimeout_sec = {agent_timeout}\n')
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")


def context(bus: Bus, config: Config, folder: Path, kind: str) -> WorkerContext:
    return WorkerContext(
        kind=kind,
        index=0,
        config=config,
        dir=folder,
        bus=bus,
        addresses=Addresses(nats=""),
        secrets=Secrets(admin=""),
        stop=asyncio.Event(),
        log=logging.getLogger(kind),
    )


class Workers:
    """Both workers as tasks of this loop."""

    def __init__(self, bus: Bus, config: Config, folder: Path) -> None:
        self.contexts = [context(bus, config, folder, kind) for kind in ("scheduler", "filter")]

    async def __aenter__(self) -> None:
        mains = (scheduler_worker.main, filter_worker.main)
        self.tasks = [asyncio.create_task(main(ctx)) for main, ctx in zip(mains, self.contexts, strict=True)]

    async def __aexit__(self, *exc: object) -> None:
        for ctx in self.contexts:
            ctx.stop.set()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*self.tasks)


async def seen(bus: Bus, kind: type[ev.Event], count: int) -> list[ev.Event]:
    """The first `count` events of a kind."""
    found: list[ev.Event] = []
    async with asyncio.timeout(DEADLINE), bus.reader(types=[kind]) as reader:
        while len(found) < count:
            record = await reader.next(timeout=1.0)
            if record is not None:
                found.append(record.event)
    return found


async def test_s16_a_step_goes_through_and_a_restart_repeats_nothing(bus: Bus, tmp_path: Path):
    for i in range(2):
        write_task(tmp_path / "tasks" / "train" / f"task{i}", agent_timeout=7.0)
    tasks = {"pool": 2, "groups_per_step": 2, "attempts_per_group": 2, "eval_every": 0}
    config = parse({"run": {"name": bus.run, "steps": 1}, "tasks": tasks, "trainer": {"dp": 1}})
    await bus.publish(ev.RunStarted(run=bus.run, config={}, config_digest="", code_version="", seed=0))
    async with Workers(bus, config, tmp_path):
        requested = await seen(bus, ev.RolloutRequested, 4)
        await bus.publish(ev.EngineReady(run=bus.run, generation="e", url="", version=0, checksum=""))
        admitted = await seen(bus, ev.RolloutAdmitted, 4)
    assert {e.attempt for e in admitted} == {e.attempt for e in requested}
    assert {e.budgets.agent for e in admitted} == {7.0}, "the task's own clock is shorter than the recipe's"
    for e in admitted:
        await bus.publish(in_run(failed(e.attempt, group=e.group), bus.run))
    async with Workers(bus, config, tmp_path):
        decided = await seen(bus, ev.GroupDecided, 2)
        skipped = {"samples": 0, "tokens": 0, "divisor": 0.0, "loss": 0.0, "grad_norm": 0.0, "metrics": {}, "seconds": {}, "checkpoint": ""}
        await bus.publish(ev.StepTrained(run=bus.run, step=0, version=0, **skipped, skipped=True, why="no group was kept"))
        await bus.publish(push_of(bus.run))
        await seen(bus, ev.RunFinished, 1)
    assert {e.reason for e in decided} == {"insufficient_valid"}
    counts = Counter(type(r.event).__name__ for r in [r async for r in bus.replay()])
    assert {k: counts[k] for k in ("StepOpened", "RolloutRequested", "RolloutAdmitted", "GroupDecided", "StepClosed", "RunFinished")} == {
        "StepOpened": 1,
        "RolloutRequested": 4,
        "RolloutAdmitted": 4,
        "GroupDecided": 2,
        "StepClosed": 1,
        "RunFinished": 1,
    }


def in_run(event: ev.InfraFailed, run: str) -> ev.InfraFailed:
    return msgspec.structs.replace(event, run=run)


def push_of(run: str) -> ev.WeightsPushed:
    result = ev.PushResult(generation="e", ok=True)
    return ev.WeightsPushed(
        run=run, version=0, plan="p", path="broadcast", attempt=1, checksum="", results=(result,), pause_seconds=0, seconds=0
    )


async def test_a_scheduler_without_tasks_says_where_they_should_be(bus: Bus, tmp_path: Path):
    with pytest.raises(TaskError, match="tasks/train"):
        await scheduler_worker.main(context(bus, parse({"run": {"name": bus.run}}), tmp_path, "scheduler"))
