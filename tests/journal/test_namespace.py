"""A step in a journal of its own: live workers decide it again there, and the original stays what it was. On a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus
from rl360.bus.codec import Recorded
from rl360.bus.connection import BusError
from rl360.bus.worker import react
from rl360.journal.namespace import CHAIN, copy_step, left_out
from rl360.launch.rundir import RunDir
from rl360.launch.stored import served
from rl360.replay.facts import facts_of
from rl360.replay.reproduce import reproduce
from rl360.trainer.group_filter import FOLDED, GroupFilter
from rl360.trainer.groups import Rules
from tests.journal.runs import lay_down, play

STEP = 1


@pytest.fixture
async def buses(tmp_path: Path) -> AsyncGenerator[tuple[Bus, Bus]]:
    """Of the run, and of the journal "again"."""
    path = await lay_down(play(tmp_path / "world"), tmp_path / "run")
    blobs = BlobStore(path / "blobs")
    async with served(RunDir(path)) as address, Bus.connect(address, "world", blobs) as run, Bus.connect(address, "again", blobs) as again:
        yield run, again


async def all_of(bus: Bus) -> list[Recorded]:
    return [r async for r in bus.replay()]


async def test_a_copy_has_what_the_step_needs_in_order_under_its_own_name(buses: tuple[Bus, Bus]) -> None:
    run, again = buses
    before = await all_of(run)
    copied = await copy_step(run, STEP, "again")
    events = [r.event for r in await all_of(again)]
    needed = [r.event async for r in _needed(run)]
    assert copied == len(events) == len(needed)
    assert events == [msgspec.structs.replace(e, run="again") for e in needed]
    assert await all_of(run) == before


async def _needed(run: Bus):
    from rl360.bus.codec import record

    async for message in run.messages({STEP}):
        yield record(message)


async def test_a_live_filter_on_the_copy_decides_what_was_decided_and_leaves_the_original_alone(buses: tuple[Bus, Bus]) -> None:
    run, again = buses
    original = await all_of(run)
    await copy_step(run, STEP, "again", before="filter")
    facts = facts_of(original, STEP)
    stop = asyncio.Event()
    worker = asyncio.create_task(react(again, GroupFilter(Rules.of(facts.config)), types=FOLDED, stop=stop))
    decided: list[ev.GroupDecided] = []
    async with asyncio.timeout(30):
        async for r in again.follow(types=[ev.GroupDecided], stop=stop):
            assert isinstance(r.event, ev.GroupDecided)
            decided.append(r.event)
            if len(decided) == len(facts.opened.groups):
                stop.set()
    await worker
    assert {d.group: msgspec.structs.replace(d, run="world") for d in decided} == facts.decided
    assert await all_of(run) == original
    assert reproduce(facts_of(await all_of(again), STEP)).differences == ()


async def test_a_worker_on_a_copy_cannot_publish_into_the_original(buses: tuple[Bus, Bus]) -> None:
    run, again = buses
    await copy_step(run, STEP, "again")
    with pytest.raises(ValueError, match="can't be published to the journal of 'again'"):
        await again.publish(ev.StepTrained(**_trained("world")))
    await again.publish(ev.StepTrained(**_trained("again")))
    assert (await all_of(run))[-1].event.run == "world"


def _trained(run: str) -> dict[str, object]:
    numbers = {"version": 9, "samples": 0, "tokens": 0, "divisor": 0.0, "loss": 0.0, "grad_norm": 0.0}
    return {"run": run, "step": 9, **numbers, "metrics": {}, "seconds": {}, "checkpoint": ""}


async def test_what_the_original_says_later_is_not_copied(buses: tuple[Bus, Bus]) -> None:
    run, again = buses
    copied = await copy_step(run, STEP, "again")
    await run.publish(ev.LateOutcome(run="world", step=STEP, attempt="t1-g000-a0", group=0, session="t1-g000-a0.9", kind="x", first_seq=1))
    await again.publish(ev.StepTrained(**_trained("again")))
    assert len(await all_of(again)) == copied + 1


async def test_a_name_that_is_taken_and_a_step_that_is_not_there_are_refused(buses: tuple[Bus, Bus]) -> None:
    run, _ = buses
    await copy_step(run, STEP, "again")
    with pytest.raises(BusError, match="there already"):
        await copy_step(run, STEP, "again")
    with pytest.raises(BusError, match="step 99 is not in the journal"):
        await copy_step(run, 99, "another")


@pytest.mark.parametrize("kind", [name for name, _ in CHAIN])
async def test_a_copy_before_a_worker_lacks_what_it_and_those_after_it_say(buses: tuple[Bus, Bus], kind: str) -> None:
    run, again = buses
    await copy_step(run, STEP, "again", before=kind)
    held = {subjects.parse(subjects.subject(r.event)).type for r in await all_of(again) if r.event.step == STEP}
    assert not held & left_out(kind)
    assert "VerifierResult" in held
