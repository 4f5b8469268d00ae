"""Retention removes what only old steps need; a kept or pinned step, and a resumed trainer, lack nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.bus import events as ev
from rl360.bus.blobs import BlobStore, digest_of
from rl360.bus.codec import Recorded
from rl360.config import Config, parse, to_toml_data
from rl360.journal import pins
from rl360.journal.pruned import Pruned
from rl360.journal.retention import Needs, Plan, plan
from rl360.journal.source import JournalError
from tests.journal.runs import message, play
from tests.trainer.world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return play(tmp_path_factory.mktemp("world"), steps=5)


def needs_of(world: World) -> Needs:
    needs = Needs()
    for record in world.journal.records:
        needs.on(message(record))
    return needs


def samples(world: World, steps: set[int]) -> set[str]:
    return {e.sample.digest for e in world.journal.of(ev.TrajectoryMerged) if e.step in steps} - {""}


CHECKPOINTS = {f"step-{i:06d}": i + 1 for i in range(5)}


def test_what_only_old_steps_need_goes(world: World) -> None:
    planned = plan(needs_of(world), CHECKPOINTS, keep_steps=2, pinned=())
    assert planned is not None
    assert (planned.first, planned.last, planned.kept) == (0, 2, ())
    assert set(planned.blobs) == samples(world, {0, 1, 2}) - samples(world, {3, 4})
    assert planned.checkpoints == ("step-000000",), "step 3 trains on version 3, its tokens may be of version 2"


def test_a_pinned_step_lacks_nothing(world: World) -> None:
    planned = plan(needs_of(world), CHECKPOINTS, keep_steps=1, pinned={1})
    assert planned is not None
    assert planned.kept == (1,)
    assert not set(planned.blobs) & samples(world, {1, 4})
    assert planned.checkpoints == ("step-000001",), "step 1 trains on version 1"


def test_nothing_is_removed_when_all_steps_are_kept(world: World) -> None:
    assert plan(needs_of(world), CHECKPOINTS, keep_steps=5, pinned=()) is None
    assert plan(needs_of(world), CHECKPOINTS, keep_steps=1, pinned={0, 1, 2, 3}) is None


STEPS = st.integers(1, 12)


@given(
    steps=STEPS,
    skipped=st.sets(st.integers(0, 11)),
    keep=STEPS,
    pinned=st.sets(st.integers(0, 11)),
    bound=st.integers(0, 3),
    under_way=st.booleans(),
)
def test_always_what_is_kept_and_a_resumed_trainer_lack_nothing(
    steps: int, skipped: set[int], keep: int, pinned: set[int], bound: int, under_way: bool
) -> None:
    needs, checkpoints, starts, version = Needs(), dict[str, int](), dict[int, int](), 0
    records: list[ev.AnyEvent] = [started(bound)]
    for step in range(steps + under_way):
        starts[step] = version
        records.append(ev.StepOpened(run="r", step=step, version=version, groups=()))
        if step == steps:
            break
        if step not in skipped:
            version += 1
            checkpoints[f"step-{step:06d}"] = version
        records.append(trained(step, version, step in skipped))
    for i, event in enumerate(records):
        needs.on(message(Recorded(i + 1, 1.0, event)))
    planned = plan(needs, checkpoints, keep_steps=keep, pinned=pinned)
    if planned is None:
        return
    left = {v for name, v in checkpoints.items() if name not in planned.checkpoints}
    kept = {s for s in starts if s > steps - 1 - keep or s in pinned}
    for step in kept:
        assert not _covers(planned, step)
        assert {v for v in range(starts[step] - bound, starts[step] + 1) if v > 0} <= left
    assert {v for v in range(version - bound, version + 1) if v > 0} <= left


def _covers(planned: Plan, step: int) -> bool:
    pruned = Pruned()
    event = ev.BlobsPruned(
        run="r", first=planned.first, last=planned.last, kept=planned.kept, blobs=0, blob_bytes=0, checkpoints=(), checkpoint_bytes=0
    )
    pruned.on(Recorded(1, 1.0, event))
    return pruned.covers(step)


def started(bound: int) -> ev.RunStarted:
    data = to_toml_data(Config())
    data["trainer"] = {**data["trainer"], "max_staleness": bound}
    assert parse(data).trainer.max_staleness == bound
    return ev.RunStarted(run="r", config=data, config_digest="c", code_version="1", seed=0)


def trained(step: int, version: int, skipped: bool) -> ev.StepTrained:
    return ev.StepTrained(
        run="r",
        step=step,
        version=version,
        samples=0,
        tokens=0,
        divisor=0,
        loss=0,
        grad_norm=0,
        metrics={},
        seconds={},
        checkpoint="",
        skipped=skipped,
    )


def test_a_blob_that_is_stored_again_is_not_removed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = store.put(b"x")
    os.utime(store.path(digest), (1, 1))
    settled = time.time() - 600
    assert store.size(digest, before=settled) == 1
    store.put(b"x")
    assert store.size(digest, before=settled) is None
    assert not store.remove(digest, before=settled)
    assert store.get(digest) == b"x"
    assert store.remove(digest)
    assert not store.remove(digest_of(b"x"))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_pins_are_kept_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert pins.pinned(tmp_path) == set()
    pins.pin(tmp_path, 3, on=True)
    pins.pin(tmp_path, 1, on=True)
    pins.pin(tmp_path, 3, on=False)
    assert pins.pinned(tmp_path) == {1}
    (tmp_path / "pins.json").write_text("{")
    with pytest.raises(JournalError, match=r"pins\.json is damaged"):
        pins.pinned(tmp_path)
