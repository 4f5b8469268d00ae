"""The trainer as a worker: real bus, real tiny engine, real optimizer steps; a crash anywhere leaves each step trained once."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rl360.bus import events as ev
from rl360.bus import sample as wire
from rl360.bus.address import Addresses, Secrets
from rl360.bus.client import Bus
from rl360.bus.worker import WorkerContext
from rl360.config import Config, parse
from rl360.trainer import checkpoints, crew_thread, worker
from rl360.trainer.distributed import process_groups

from .conftest import VOCAB

DEADLINE = 90.0
ATTEMPTS = 4


def recipe(folder: Path, **trainer: object) -> Config:
    return parse(
        {
            "run": {"name": "trainer", "steps": 3, "schedule": "sync"},
            "policy": {"path": str(folder)},
            "sampling": {"context": 128},
            "trainer": {"lr": 1e-2, "microbatch_tokens": 128, **trainer},
            "push": {"timeout": 20, "call_timeout": 10},
            "supervise": {"drain_seconds": 20},
        }
    )


def context(bus: Bus, config: Config, folder: Path) -> WorkerContext:
    return WorkerContext(
        kind="trainer",
        index=0,
        config=config,
        dir=folder,
        bus=bus,
        addresses=Addresses(nats=""),
        secrets=Secrets(admin=""),
        stop=asyncio.Event(),
        log=logging.getLogger("trainer"),
    )


class Running:
    """The worker as a task of this loop. `crash`: the worker is expected to raise `Crash`."""

    def __init__(self, bus: Bus, config: Config, folder: Path) -> None:
        self.ctx = context(bus, config, folder)

    async def __aenter__(self) -> Running:
        self.task = asyncio.create_task(worker.main(self.ctx))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ctx.stop.set()
        async with asyncio.timeout(DEADLINE):
            await asyncio.wait([self.task])
        if not self.task.cancelled() and self.task.exception() is not None and not isinstance(self.task.exception(), Crash):
            raise self.task.exception()  # type: ignore[misc]


class Crash(Exception):
    """Ends the worker where it stands, as a kill would."""


class Story:
    """Publishes what the other workers of a run would."""

    def __init__(self, bus: Bus, url: str = "", version: int = 0) -> None:
        self.bus, self.url, self.rng = bus, url, np.random.default_rng(0)

    async def engine(self, generation: str = "engine0-1") -> None:
        await self.bus.publish(ev.EngineJoined(run=self.bus.run, generation=generation, url=self.url))

    async def step(self, step: int, version: int, *, kept: bool = True) -> None:
        """A step of two groups, all attempts over and all groups decided."""
        specs = tuple(ev.GroupSpec(group=g, task="t", digest="d", domain="fix", attempts=ATTEMPTS) for g in range(2))
        await self.bus.publish(ev.StepOpened(run=self.bus.run, step=step, version=version, groups=specs))
        for spec in specs:
            decisions = [await self._attempt(step, spec.group, i, version) for i in range(ATTEMPTS)]
            await self.bus.publish(
                ev.GroupDecided(
                    run=self.bus.run,
                    step=step,
                    group=spec.group,
                    domain="fix",
                    kept=kept,
                    reason="" if kept else "all_pass",
                    attempts=tuple(d if kept else dropped(d) for d in decisions),
                )
            )

    async def _attempt(self, step: int, group: int, index: int, version: int) -> ev.AttemptDecision:
        name = ev.attempt_id(ev.Purpose.TRAIN, step, group, index)
        about = {"run": self.bus.run, "step": step, "attempt": name, "group": group, "session": f"{name}.1"}
        n = int(self.rng.integers(10, 40))
        mask = (self.rng.random(n) < 0.5).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        sample = wire.make(
            attempt=name,
            branch=0,
            ids=self.rng.integers(0, VOCAB, n).astype(np.int32),
            mask=mask,
            logprobs=np.where(mask, -np.log(VOCAB), 0).astype(np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
        )
        receipt = ev.Receipt(file="f", file_digest="f", verifier_digest="v", exit_status=0, agent_dead_at=1.0, written_at=2.0)
        verdict = {"reward": float(index % 2), "low": 0.0, "high": 1.0, "receipt": receipt, "exit_status": 0}
        await self.bus.publish(ev.VerifierResult(**about, **verdict, agent_end=ev.AgentEnd.SUBMITTED))
        counts = {"tokens": n, "sampled": int(mask.sum()), "turns": 1, "dropped_turns": 0, "format_errors": 0}
        payload = self.bus.blobs.pack(wire.encode(sample))
        await self.bus.publish(ev.TrajectoryMerged(**about, **counts, branch=0, min_version=version, max_version=version, sample=payload))
        return ev.AttemptDecision(attempt=name, fate=ev.Fate.TRAINED, reward=float(index % 2), advantage=index % 2 - 0.5)

    async def seen(self, kind: type[ev.Event], count: int) -> list[ev.Event]:
        """The journal's events of a type, once there are `count` of them."""
        async with asyncio.timeout(DEADLINE):
            stop = asyncio.Event()
            found: list[ev.Event] = []
            async for record in self.bus.follow(types=[kind], stop=stop):
                found.append(record.event)
                if len(found) == count:
                    return found
        raise AssertionError

    async def all(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [record.event async for record in self.bus.replay(types=[kind])]


def dropped(decision: ev.AttemptDecision) -> ev.AttemptDecision:
    return ev.AttemptDecision(attempt=decision.attempt, fate=ev.Fate.DROPPED, reward=decision.reward)


@pytest.fixture(scope="module")
def engine_url(dense_folder: Path) -> Iterator[str]:
    """One tiny engine in a process of its own; it takes the pushes of all tests."""
    command = (sys.executable, "-m", "rl360.engines.tiny", "--model", str(dense_folder), "--timeout", "20")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


@pytest.fixture
def story(bus: Bus, engine_url: str) -> Story:
    return Story(bus, engine_url)


async def test_steps_are_trained_saved_and_pushed(story, bus, dense_folder, tmp_path):
    async with Running(bus, recipe(dense_folder), tmp_path):
        await story.engine()
        (first,) = await story.seen(ev.WeightsPushed, 1)
        assert (first.version, first.step, first.results[0].ok) == (0, -1, True)
        for step in range(2):
            await story.step(step, step)
            pushes = await story.seen(ev.WeightsPushed, step + 2)
            assert (pushes[-1].version, pushes[-1].step, pushes[-1].results[0].ok) == (step + 1, step, True)
    trained = await story.all(ev.StepTrained)
    assert [(t.step, t.version, t.samples, t.skipped) for t in trained] == [(0, 1, 8, False), (1, 2, 8, False)]
    event = trained[1]
    assert event.tokens == event.divisor == event.metrics["train/tokens"]
    assert len(set(event.sample_digests)) == 8
    assert {"load", "forward_backward", "optimizer", "save"} <= event.seconds.keys()
    assert {"logp/delta_mean", "logp/delta_max", "train/tis", "train/clipped", "train/entropy", "staleness/max"} <= event.metrics.keys()
    assert event.metrics["logp/alarm"] == 1, "the samples' log-probs are made up"
    found = checkpoints.latest(tmp_path / "checkpoints").checkpoint
    assert found is not None
    assert str(found.path.relative_to(tmp_path)) == event.checkpoint


async def test_s21_a_step_without_survivors_is_skipped_and_the_next_one_trains(story, bus, dense_folder, tmp_path):
    async with Running(bus, recipe(dense_folder), tmp_path):
        await story.step(0, 0, kept=False)
        await story.step(1, 0)
        skipped, trained = await story.seen(ev.StepTrained, 2)
    assert (skipped.skipped, skipped.version, skipped.why) == (True, 0, "no sample survived: all_pass 2")
    assert (trained.step, trained.version, trained.skipped) == (1, 1, False)


async def test_a_joiner_gets_the_current_version(story, bus, dense_folder, tmp_path):
    async with Running(bus, recipe(dense_folder), tmp_path):
        await story.engine()
        await story.step(0, 0)
        await story.seen(ev.WeightsPushed, 2)
        await story.engine("engine1-1")
        pushes = await story.seen(ev.WeightsPushed, 3)
    assert (pushes[-1].version, pushes[-1].attempt) == (1, 2)
    assert [r.generation for r in pushes[-1].results] == ["engine1-1"]


CRASHES = {
    "before the checkpoint is complete": (checkpoints, "commit"),
    "after the checkpoint, before the event": (worker.Trainer, "_publish_once"),
    "after the event, before the push": (worker.Trainer, "_push"),
}


@pytest.mark.parametrize("place", CRASHES)
async def test_a_crash_leaves_each_step_trained_once_and_every_version_pushed(place, story, bus, dense_folder, tmp_path, monkeypatch):
    await story.step(0, 0)
    await story.step(1, 0)
    owner, name = CRASHES[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crashing(asyncio.iscoroutinefunction(getattr(owner, name))))
        async with Running(bus, recipe(dense_folder), tmp_path) as running:
            if name == "_push":
                await story.engine()
            with pytest.raises(Crash):
                await asyncio.wait_for(asyncio.shield(running.task), DEADLINE)
    async with Running(bus, recipe(dense_folder), tmp_path):
        await story.seen(ev.StepTrained, 2)
        await story.engine("engine0-2")
        async with asyncio.timeout(DEADLINE):
            while (await story.seen(ev.WeightsPushed, 1))[-1].version < 2 and max(p.version for p in await story.all(ev.WeightsPushed)) < 2:
                await asyncio.sleep(0.05)
    trained = await story.all(ev.StepTrained)
    assert [(t.step, t.version) for t in trained] == [(0, 1), (1, 2)]
    assert trained == [decoded(tmp_path, t.step) for t in trained], "the journal and the checkpoints say the same"


def crashing(coroutine: bool):
    def crash(*_: object, **__: object) -> None:
        raise Crash

    async def crash_later(*_: object, **__: object) -> None:
        raise Crash

    return crash_later if coroutine else crash


def decoded(folder: Path, step: int) -> ev.Event:
    from rl360.bus.codec import decode

    return decode(checkpoints.verify(folder / "checkpoints" / checkpoints.name_of(step)).manifest.event)


async def test_a_lost_checkpoint_is_made_again_from_the_journal_with_the_same_weights(story, bus, dense_folder, tmp_path, caplog):
    await story.step(0, 0)
    await story.step(1, 0)
    async with Running(bus, recipe(dense_folder), tmp_path):
        before = await story.seen(ev.StepTrained, 2)
    path = tmp_path / "checkpoints" / "step-000001"
    weights = next((path / "weights").glob("*.distcp"))
    content = weights.read_bytes()
    os.truncate(weights, 100)
    async with Running(bus, recipe(dense_folder), tmp_path), asyncio.timeout(DEADLINE):
        while not (tmp_path / "checkpoints" / "step-000001.damaged-1").exists() or not path.exists():
            await asyncio.sleep(0.05)
    assert next((path / "weights").glob("*.distcp")).read_bytes() == content
    assert await story.all(ev.StepTrained) == before
    assert "step-000001" in caplog.text, "the fallback is visible"


@pytest.mark.parametrize("old_policy", ["sampler", "keep_old_actor"])
async def test_s22_tokens_of_an_older_version_are_compared_under_their_own(old_policy, story, bus, dense_folder, tmp_path):
    """one_step: step 1's tokens were sampled by version 0 and train version 1."""
    config = recipe(dense_folder, old_policy=old_policy)
    config = parse({**json_of(config), "run": {"name": "trainer", "steps": 2, "schedule": "one_step"}})
    async with Running(bus, config, tmp_path):
        await story.step(0, 0)
        await story.step(1, 0)
        first, second = await story.seen(ev.StepTrained, 2)
    assert (first.metrics["staleness/max"], second.metrics["staleness/max"]) == (0, 1)
    assert second.metrics["logp/delta_n"] > 0
    same = second.metrics["logp/delta_n"] == second.metrics["train/tokens"]
    assert same == (old_policy == "keep_old_actor"), "the probe is one microbatch"


def json_of(config: Config) -> dict[str, object]:
    from rl360.config import to_toml_data

    return to_toml_data(config)


async def test_a_checkpoint_of_another_run_is_refused_by_name(story, bus, dense_folder, tmp_path):
    folder = tmp_path / "checkpoints" / "step-000000"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": 0, "version": 1, "event": "AAAA", "files": {}}))
    from rl360.bus.codec import EventError

    with pytest.raises(EventError, match="step-000000"):
        await asyncio.wait_for(worker.main(context(bus, recipe(dense_folder), tmp_path)), DEADLINE)


async def test_no_thread_or_group_is_left_behind(bus, dense_folder, tmp_path):
    for _ in range(2):
        async with crew_thread.CrewThread(recipe(dense_folder), tmp_path):
            pass
    with process_groups():
        pass
