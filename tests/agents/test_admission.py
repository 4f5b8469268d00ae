"""A runner's door to its node: room, pulls, deadlines and starts that are tried again (CASES 35, 41)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rl360.agents.admission import Admission
from rl360.agents.outcomes import InfraError
from rl360.agents.placement import Need
from rl360.agents.runner import start_maker
from rl360.agents.sandbox.base import Limits
from rl360.agents.sandbox.bwrap import BwrapSandbox
from rl360.agents.staging import Staged
from rl360.agents.waves import Start
from rl360.bus.events import Boundary, Cause, Phase, StartRetried
from rl360.config import Sandbox as SandboxSection
from tests.agents.harbor import make_task
from tests.agents.test_runner import Stage, quick, session, stage, task

__all__ = ["quick", "session", "stage", "task"]

ONE = Need.of(512, 1)


def start(name: str, image: str = "", need: Need = ONE) -> Start:
    return Start(id=name, need=need, image=image)


def soon() -> float:
    return time.time() + 20


async def settled() -> None:
    """Let everybody who can go on go on."""
    for _ in range(5):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------ the door


async def test_who_finds_no_room_waits_until_somebody_leaves() -> None:
    door = Admission(total=ONE, max_pulls=0)
    first = await door.enter(start("first"), soon())
    waiting = asyncio.create_task(door.enter(start("second"), soon()))
    await settled()
    assert not waiting.done()
    first.started(ok=True)
    await settled()
    assert not waiting.done(), "it runs, and keeps what it reserved"
    first.leave()
    first.leave()
    second = await waiting
    assert door.node.reserved == ONE
    second.leave()
    assert door.node.reserved == Need()


async def test_one_pulls_an_image_and_the_others_find_it_warm() -> None:
    door = Admission(total=Need(), max_pulls=2)
    seats = [asyncio.create_task(door.enter(start(str(n), "image"), soon())) for n in range(4)]
    await settled()
    assert [seat.done() for seat in seats] == [True, False, False, False]
    (await seats[0]).started(ok=True)
    await settled()
    assert all(seat.done() for seat in seats)
    assert door.node.pulling == frozenset()


async def test_cases_35_a_wait_has_a_deadline_and_says_what_was_missing() -> None:
    door = Admission(total=ONE, max_pulls=1)
    await door.enter(start("first", "image"), soon())
    with pytest.raises(InfraError, match=r"waited for room on the node: 512 of 512 MiB") as full:
        await door.enter(start("second"), time.time())
    assert (full.value.boundary, full.value.cause) == (Boundary.QUEUE, Cause.TIMEOUT)
    with pytest.raises(InfraError, match="waited for image other: 1 pulls under way"):
        await door.enter(start("third", "other"), time.time())


async def test_who_gives_up_in_the_door_lets_the_others_pass() -> None:
    door = Admission(total=Need.of(1024, 2), max_pulls=0)
    await door.enter(start("first"), soon())
    large = asyncio.create_task(door.enter(start("large", need=Need.of(1024, 1)), soon()))
    small = asyncio.create_task(door.enter(start("small"), soon()))
    await settled()
    assert not small.done()
    large.cancel()
    await settled()
    assert small.done()


async def test_who_is_let_in_while_it_is_cancelled_holds_nothing() -> None:
    door = Admission(total=ONE, max_pulls=0)
    first = await door.enter(start("first"), soon())
    second = asyncio.create_task(door.enter(start("second"), soon()))
    await settled()
    first.leave()
    second.cancel()
    await asyncio.wait({second})
    assert door.node.reserved == Need()


async def test_what_can_never_fit_is_refused_at_once_with_the_remedy() -> None:
    door = Admission(total=ONE, max_pulls=0)
    with pytest.raises(InfraError, match=r"needs 513 MiB and 1 CPUs, .* 512 MiB and 1 CPUs \(runners\.memory_mb") as refused:
        await door.enter(start("first", need=Need.of(513, 1)), soon())
    assert refused.value.cause is Cause.BAD_TASK


def test_a_start_needs_what_its_sandbox_is_allowed(tmp_path: Path) -> None:
    """A workdir of a bubblewrap sandbox is in memory; a verifier of its own has a second one. A container's is on disk."""
    limits, staged = Limits(memory_mb=100, storage_mb=50, pids=9, cpus=0.5), Staged(None, tmp_path, None)
    shared = make_task(tmp_path / "task")
    assert start_maker(SandboxSection(), lambda _: limits)("s", shared, staged, 0.0) == start("s", need=Need.of(150, 0.5))
    apart = replace(shared, separate_verifier=True)
    assert start_maker(SandboxSection(), lambda _: limits)("s", apart, staged, 0.0) == start("s", need=Need.of(200, 0.5))
    docker = start_maker(SandboxSection(kind="docker", image="base"), lambda _: limits)("s", shared, staged, 0.0)
    assert docker == start("s", "base", Need.of(100, 0.5))


# ------------------------------------------------------------------------------------------------ a real runner


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many sandboxes there are, after each start."""
    there, counts = set[str](), list[int]()
    begin, close = BwrapSandbox.start, BwrapSandbox.close

    def counted_start(self: BwrapSandbox) -> None:
        there.add(self.id)
        counts.append(len(there))
        begin(self)

    def counted_close(self: BwrapSandbox) -> None:
        close(self)
        there.discard(self.id)

    monkeypatch.setattr(BwrapSandbox, "start", counted_start)
    monkeypatch.setattr(BwrapSandbox, "close", counted_close)
    yield counts
    assert there == set()


async def test_no_more_sandboxes_than_the_runner_may_reserve_and_everybody_gets_a_turn(stage: Stage, together: list[int]) -> None:
    attempts = [await stage.admit() for _ in range(8)]
    async with stage.running(runners={"slots": 8, "memory_mb": 1100}):
        outcomes = await stage.outcomes(8)
    assert sorted(outcomes) == attempts
    assert {o.reward for o in outcomes.values()} == {1.0}  # type: ignore[union-attr]
    assert max(together) == 2


async def test_s15_a_wait_for_room_is_the_queues_and_opens_no_session(stage: Stage) -> None:
    first = await stage.admit()
    stage.session.trouble = ["hang"]
    async with stage.running(agent={"script": ["ask"]}, runners={"slots": 2, "memory_mb": 600}):
        await stage.phase_began(Phase.AGENT, 1)  # of two that come together, either may enter first
        second = await stage.admit(queue=0.8)
        failed = await stage.failed()
    assert failed.attempt == second != first
    assert (failed.boundary, failed.cause, failed.exception) == (Boundary.QUEUE, Cause.TIMEOUT, "NotAdmitted")
    assert len(stage.session.opened) == 1


def failing_starts(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    begin, left = BwrapSandbox.start, iter(range(times))

    def flaky(self: BwrapSandbox) -> None:
        begin(self)
        if (number := next(left, None)) is not None:
            raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"the registry refused, time {number + 1}")

    monkeypatch.setattr(BwrapSandbox, "start", flaky)


async def test_a_start_that_failed_for_a_moment_is_tried_again_and_the_journal_says_so(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_starts(monkeypatch, 2)
    await stage.admit()
    async with stage.running(waves={"retry_seconds": 0.05}, runners={"slots": 1, "memory_mb": 600}):
        outcome = await stage.verified()
    assert outcome.reward == 1.0
    retried = await stage.events(StartRetried)
    assert [(e.tries, e.cause, e.detail) for e in retried] == [
        (1, Cause.START_FAILED, "the registry refused, time 1"),
        (2, Cause.START_FAILED, "the registry refused, time 2"),
    ]
    assert stage.nothing_left()


async def test_s13_a_start_that_never_works_is_told_by_its_first_failure(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_starts(monkeypatch, 100)
    await stage.admit()
    async with stage.running(waves={"tries": 2, "retry_seconds": 0.05}):
        failed = await stage.failed()
    assert (failed.boundary, failed.cause, failed.detail) == (Boundary.SANDBOX, Cause.START_FAILED, "the registry refused, time 1")
    assert len(await stage.events(StartRetried)) == 1
    assert stage.nothing_left()
