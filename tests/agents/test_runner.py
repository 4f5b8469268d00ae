"""The runner on a real bus: every admitted attempt gets exactly one typed outcome, whatever goes wrong (S12-S17)."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl360.agents import runner
from rl360.agents.sandbox.base import LABEL
from rl360.agents.sandbox.bwrap import BwrapSandbox
from rl360.agents.sandbox.leases import labelled
from rl360.agents.tasks import Task
from rl360.bus import subjects
from rl360.bus.address import Addresses, Secrets
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus
from rl360.bus.connection import api
from rl360.bus.events import (
    AgentEnd,
    Boundary,
    Budgets,
    Cause,
    InfraFailed,
    LimitNotEnforced,
    Phase,
    Purpose,
    RolloutAdmitted,
    RolloutPhase,
    RunStarted,
    SessionOpened,
    VerifierResult,
    attempt_id,
    session_id,
)
from rl360.bus.worker import WorkerContext
from rl360.config import parse
from tests.agents.fake_session import SUBMIT, FakeSession, call, text, turns
from tests.agents.harbor import make_task
from tests.conftest import NatsServer

BUDGETS = {"queue": 30.0, "setup": 20.0, "agent": 20.0, "verify": 10.0, "collect": 10.0, "margin": 5.0}
SOLVE = "echo 42 > answer.txt"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ACK_WAIT", 2.0)
    monkeypatch.setattr(runner, "_BEAT", 0.3)
    monkeypatch.setattr(runner, "_POLL", 0.05)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "tasks/train/hello")


@pytest.fixture
async def session() -> AsyncIterator[FakeSession]:
    async with FakeSession(turns(call(SOLVE), SUBMIT)) as server:
        yield server


def recipe(**sections: dict[str, Any]) -> dict[str, Any]:
    agent = {"harness": "scripted", "script": [SOLVE], **sections.pop("agent", {})}
    return {"agent": agent, "runners": {"slots": 4}, "supervise": {"drain_seconds": 3.0}, **sections}


class Stage:
    """A bus, a session server, tasks, and runners that can be started."""

    def __init__(self, bus: Bus, session: FakeSession, folder: Path, task: Task) -> None:
        self.bus, self.session, self.dir, self.task = bus, session, folder, task
        self.attempts = 0
        self.index = secrets.randbelow(10**6)  # of its runners, whose name is in the environment of their processes

    def admitted(self, *, digest: str = "", **budgets: float) -> RolloutAdmitted:
        index = self.attempts
        self.attempts += 1
        return RolloutAdmitted(
            run=self.bus.run,
            step=3,
            attempt=attempt_id(Purpose.TRAIN, 3, 1, index),
            group=1,
            index=index,
            task=self.task.name,
            digest=digest or self.task.digest,
            budgets=Budgets(**{**BUDGETS, **budgets}),
            wave=0,
            admitted=time.time(),
        )

    async def admit(self, *, digest: str = "", **budgets: float) -> str:
        event = self.admitted(digest=digest, **budgets)
        await self.bus.publish(event)
        return event.attempt

    @asynccontextmanager
    async def running(self, **sections: dict[str, Any]) -> AsyncIterator[asyncio.Event]:
        stop = asyncio.Event()
        ctx = WorkerContext(
            kind="runner",
            index=self.index,
            config=parse(recipe(**sections)),
            dir=self.dir,
            bus=self.bus,
            addresses=Addresses(nats="", sessions=(self.session.url,)),
            secrets=Secrets(admin="admin-key"),
            stop=stop,
            log=logging.getLogger("runner"),
        )
        main = asyncio.create_task(runner.main(ctx))
        try:
            yield stop
        finally:
            stop.set()
            await asyncio.wait_for(main, 20)

    async def outcomes(self, count: int, seconds: float = 30.0) -> dict[str, VerifierResult | InfraFailed]:
        """The first `count` terminal outcomes, by attempt; each attempt at most once."""
        found: dict[str, VerifierResult | InfraFailed] = {}
        stop = asyncio.Event()
        async with asyncio.timeout(seconds):
            async for record in self.bus.follow(types=[VerifierResult, InfraFailed], stop=stop):
                assert isinstance(record.event, VerifierResult | InfraFailed)
                assert record.event.attempt not in found
                found[record.event.attempt] = record.event
                if len(found) == count:
                    return found
        raise AssertionError

    async def outcome(self) -> VerifierResult | InfraFailed:
        (only,) = (await self.outcomes(1)).values()
        return only

    async def verified(self) -> VerifierResult:
        outcome = await self.outcome()
        assert isinstance(outcome, VerifierResult), outcome
        return outcome

    async def failed(self) -> InfraFailed:
        outcome = await self.outcome()
        assert isinstance(outcome, InfraFailed), outcome
        return outcome

    async def events(self, *types: type[Any]) -> list[Any]:
        return [r.event async for r in self.bus.replay(types=types)]

    async def phase_began(self, phase: Phase, life: int) -> None:
        async with asyncio.timeout(20):
            async for record in self.bus.follow(types=[RolloutPhase], stop=asyncio.Event()):
                event = record.event
                assert isinstance(event, RolloutPhase)
                if event.phase is phase and event.end is None and event.session.endswith(f".{life}"):
                    return

    async def all_acknowledged(self) -> None:
        """No delivery is open and none is to come."""
        path = f"CONSUMER.INFO.{subjects.stream(self.bus.run)}.{runner.DURABLE}"
        async with asyncio.timeout(20):
            while (info := await api(self.bus.client, path))["num_ack_pending"] or info["num_pending"]:
                await asyncio.sleep(0.05)

    def nothing_left(self) -> bool:
        assert labelled(f"{LABEL}=runner{self.index}-".encode()) == []
        assert [str(p) for p in (self.dir / "sandboxes").rglob("*")] == []
        return True


@pytest.fixture
def stage(bus: Bus, session: FakeSession, tmp_path: Path, task: Task) -> Stage:
    return Stage(bus, session, tmp_path, task)


# ------------------------------------------------------------------------------------------------ outcomes


async def test_s16_every_admitted_attempt_gets_one_outcome_and_its_phases(stage: Stage) -> None:
    attempts = [await stage.admit() for _ in range(6)]
    async with stage.running():
        outcomes = await stage.outcomes(6)
    assert sorted(outcomes) == attempts
    for outcome in outcomes.values():
        assert isinstance(outcome, VerifierResult)
        assert (outcome.reward, outcome.agent_end, outcome.teardown_error) == (1.0, AgentEnd.SUBMITTED, "")
        assert outcome.receipt.agent_dead_at <= outcome.receipt.written_at + 0.05
    phases = await stage.events(RolloutPhase)
    for attempt in attempts:
        ended = [p.phase for p in phases if p.attempt == attempt and p.end is not None]
        assert sorted(ended) == sorted(Phase)
        assert [p.phase for p in phases if p.attempt == attempt and p.end is None] == [Phase.AGENT]
    assert sorted(stage.session.closed) == [(session_id(a, 1), "submitted") for a in attempts]
    assert stage.nothing_left()


async def test_mini_swe_agent_end_to_end(stage: Stage) -> None:
    await stage.admit()
    async with stage.running(agent={"harness": "mini_swe", "script": []}):
        outcome = await stage.verified()
    assert (outcome.reward, outcome.agent_end) == (1.0, AgentEnd.SUBMITTED)
    assert {r["authorization"] for r in stage.session.requests} == {f"Bearer key-{outcome.session}"}
    assert all(r["traceparent"].startswith("00-") for r in stage.session.requests)


async def test_cases_8_the_verdict_stands_although_the_agent_ran_out_of_time(stage: Stage) -> None:
    await stage.admit(agent=2.0)
    async with stage.running(agent={"script": [SOLVE, "sleep 60"], "command_timeout": 50.0}):
        outcome = await stage.verified()
    assert (outcome.reward, outcome.agent_end) == (1.0, AgentEnd.TIMEOUT)


async def test_cases_36_an_attempt_that_hangs_gives_its_slot_back(stage: Stage) -> None:
    stage.session.trouble = ["hang"]
    stage.session.policy = lambda _: text("noted")
    first, second = await stage.admit(agent=0.5), await stage.admit()
    async with stage.running(agent={"script": ["ask", SOLVE]}, runners={"slots": 1}):
        outcomes = await stage.outcomes(2)
    assert [(o.attempt, o.agent_end) for o in outcomes.values()] == [(first, AgentEnd.TIMEOUT), (second, AgentEnd.SUBMITTED)]
    assert [o.reward for o in outcomes.values() if isinstance(o, VerifierResult)] == [0.0, 1.0]


async def test_cases_1_and_2_no_reward_is_a_typed_outcome(stage: Stage, tmp_path: Path) -> None:
    stage.task = make_task(tmp_path / "tasks/train/silent", test="exit 0\n")
    await stage.admit()
    async with stage.running():
        failed = await stage.failed()
    assert (failed.boundary, failed.cause, failed.agent_end) == (Boundary.VERIFIER, Cause.NO_REWARD, AgentEnd.SUBMITTED)


async def test_s15_a_wait_in_the_queue_that_was_too_long_is_the_queues(stage: Stage) -> None:
    await stage.admit(queue=0.001)
    async with stage.running():
        failed = await stage.failed()
    assert (failed.boundary, failed.cause) == (Boundary.QUEUE, Cause.TIMEOUT)
    assert stage.session.opened == []


async def test_s13_a_session_server_that_is_away(stage: Stage) -> None:
    await stage.admit(setup=0.6)
    await stage.session._runner.cleanup()
    async with stage.running():
        failed = await stage.failed()
    assert (failed.boundary, failed.cause, failed.agent_end) == (Boundary.SESSION, Cause.LOST, None)


async def test_s13_a_session_that_cannot_be_closed_is_no_verdict(stage: Stage) -> None:
    """Its last turns may be missing from the journal, so nothing of it may train."""
    attempt = await stage.admit(collect=0.5)
    stage.session.refuse_close = True
    async with stage.running():
        failed = await stage.failed()
    assert (failed.attempt, failed.boundary, failed.cause) == (attempt, Boundary.COLLECT, Cause.LOST)
    assert failed.agent_end is AgentEnd.SUBMITTED


async def test_s13_a_task_that_changed(stage: Stage) -> None:
    await stage.admit(digest="0" * 64)
    async with stage.running():
        failed = await stage.failed()
    assert (failed.boundary, failed.cause) == (Boundary.SANDBOX, Cause.BAD_TASK)
    assert "restore the task" in failed.detail


async def test_s13_an_agent_program_that_raises_is_unknown_and_no_zero(stage: Stage) -> None:
    await stage.admit()
    async with stage.running(agent={"script": ["fail: boom"]}):
        failed = await stage.failed()
    assert (failed.boundary, failed.cause, failed.exception, failed.detail) == (Boundary.AGENT, Cause.UNKNOWN, "RuntimeError", "boom")


async def test_s13_teardown_errors_never_replace_the_outcome(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    close = BwrapSandbox.close

    def stuck(self: BwrapSandbox) -> None:
        close(self)
        raise OSError("the disk is stuck")

    monkeypatch.setattr(BwrapSandbox, "close", stuck)
    await stage.admit()
    async with stage.running():
        outcome = await stage.verified()
    assert outcome.reward == 1.0
    assert "the disk is stuck" in outcome.teardown_error


async def test_s14_a_sandbox_that_its_agent_ran_out_of_memory_is_judged(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await stage.admit()
    hog = "x=$(head -c 900000000 /dev/zero | tr '\\0' x)"
    async with stage.running(agent={"script": [SOLVE, hog]}, sandbox={"memory_mb": 64}):
        assert (await stage.verified()).reward == 1.0


async def test_s14_a_sandbox_whose_agent_filled_its_disk_is_judged(stage: Stage) -> None:
    await stage.admit()
    fill = "head -c 9000000 /dev/zero > filler; head -c 90000000 /dev/zero > /tmp/filler; head -c 90000000 /dev/zero > /logs/filler"
    async with stage.running(agent={"script": [SOLVE, fill]}, sandbox={"storage_mb": 1}):
        assert (await stage.verified()).reward == 1.0


# ------------------------------------------------------------------------------------------------ lives


async def give_back(stage: Stage, times: int) -> None:
    """Take the delivery and give it back, as a runner does that must stop."""
    share = stage.bus.consume(runner.DURABLE, [RolloutAdmitted], ack_wait=runner.ACK_WAIT, max_deliver=5, max_in_flight=1024)
    async with share:
        for _ in range(times):
            delivery = await share.next(10)
            assert delivery is not None
            await delivery.nak(0.0)


async def test_s16_an_attempt_that_has_its_outcome_is_not_run_again(stage: Stage) -> None:
    """Its runner died after the outcome was recorded and before the delivery was acknowledged."""
    admitted = stage.admitted()
    await stage.bus.publish(admitted)
    done = InfraFailed(
        run=stage.bus.run,
        step=3,
        attempt=admitted.attempt,
        group=1,
        session=session_id(admitted.attempt, 1),
        boundary=Boundary.ENGINE,
        cause=Cause.LOST,
        exception="X",
    )
    await stage.bus.publish(done)
    await give_back(stage, 1)
    other = await stage.admit()
    async with stage.running():
        outcomes = await stage.outcomes(2)
    assert outcomes[admitted.attempt] == done
    assert stage.session.opened == [session_id(other, 1)]


async def test_cases_12_a_poison_attempt_is_capped_and_says_so(stage: Stage) -> None:
    await stage.admit()
    await give_back(stage, 3)
    async with stage.running(agent={"max_lives": 3}):
        failed = await stage.failed()
    assert (failed.boundary, failed.cause, failed.session) == (Boundary.QUEUE, Cause.ATTEMPTS_EXHAUSTED, session_id(failed.attempt, 4))
    assert stage.session.opened == []


async def test_cases_39_a_stopping_runner_gives_its_attempt_to_another(stage: Stage) -> None:
    attempt = await stage.admit()
    async with stage.running(agent={"script": ["sleep 60"], "command_timeout": 50.0}, supervise={"drain_seconds": 3.0}) as stop:
        await stage.phase_began(Phase.AGENT, 1)
        stop.set()
    assert stage.nothing_left()
    assert await stage.events(VerifierResult, InfraFailed) == []
    async with stage.running():
        outcome = await stage.verified()
    assert (outcome.session, outcome.reward) == (session_id(attempt, 2), 1.0)


async def test_cases_39_and_40_kill_9_of_a_runner_loses_no_attempt_and_leaves_nothing(
    stage: Stage, nats: NatsServer, tmp_path: Path
) -> None:
    attempts = [await stage.admit() for _ in range(3)]
    address = nats.address()
    given = {
        "url": address.url,
        "user": address.user,
        "password": address.password,
        "run": stage.bus.run,
        "index": str(stage.index),
        "dir": str(tmp_path),
        "session": stage.session.url,
        "ack_wait": str(runner.ACK_WAIT),
        "config": json.dumps(recipe(agent={"script": [SOLVE, "sleep 60"], "command_timeout": 50.0})),
    }
    argv = [sys.executable, "-m", "tests.agents.runner_process", json.dumps(given)]
    victim = await asyncio.create_subprocess_exec(*argv, cwd=Path(__file__).parents[2])
    await stage.phase_began(Phase.AGENT, 1)
    victim.kill()
    await victim.wait()
    async with stage.running():
        outcomes = await stage.outcomes(3)
    assert {a: o.session for a, o in outcomes.items()} == {a: session_id(a, 2) for a in attempts}
    assert all(isinstance(o, VerifierResult) for o in outcomes.values())
    assert stage.nothing_left()


# ------------------------------------------------------------------------------------------------ after a crash


async def test_s16_a_consumer_that_forgot_all_repeats_no_attempt_and_no_session(stage: Stage) -> None:
    """The shared consumer of a resumed run is new: it shares out what is over, and what had lives, as if for the first time."""
    over, begun, fresh = await stage.admit(), await stage.admit(), stage.admitted()
    async with stage.running(agent={"script": [SOLVE]}):
        await stage.outcomes(2)
    await stage.bus.forget_consumer(runner.DURABLE)
    stage.session.opened.clear()
    lived = stage.admitted()
    opened = SessionOpened(
        run=stage.bus.run, step=3, attempt=lived.attempt, group=1, session=session_id(lived.attempt, 2), template="t", sampling={}
    )
    for event in (lived, opened, RunStarted(run=stage.bus.run, config={}, config_digest="", code_version="", seed=0, resumed=1)):
        await stage.bus.publish(event)
    async with stage.running():
        await stage.bus.publish(fresh)
        outcomes = await stage.outcomes(4)
    assert {o.session for o in outcomes.values()} == {
        session_id(over, 1),
        session_id(begun, 1),
        session_id(lived.attempt, 3),
        session_id(fresh.attempt, 1),
    }
    assert len(stage.session.opened) == 2


async def test_s16_a_consumer_that_forgets_what_is_under_way_starts_no_second_life(stage: Stage) -> None:
    attempt = await stage.admit()
    async with stage.running(agent={"script": ["sleep 1", SOLVE]}):
        await stage.phase_began(Phase.AGENT, 1)
        await stage.bus.forget_consumer(runner.DURABLE)
        other = await stage.admit()
        outcomes = await stage.outcomes(2)
    assert {o.session for o in outcomes.values()} == {session_id(attempt, 1), session_id(other, 1)}
    assert len(stage.session.opened) == 2


async def test_s16_a_server_that_forgets_what_it_gave_out_starts_no_second_life(
    own_nats: NatsServer, session: FakeSession, tmp_path: Path, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """nats-server writes a consumer's state down some time after a delivery: a kill between the two loses it."""
    async with Bus.connect(own_nats.address(), "test", BlobStore(tmp_path / "blobs"), name="test") as bus:
        await bus.create_streams()
        stage = Stage(bus, session, tmp_path, task)
        async with stage.running(agent={"script": ["sleep 1", SOLVE]}):
            attempt = await stage.admit()
            await stage.phase_began(Phase.AGENT, 1)
            await asyncio.to_thread(own_nats.kill)
            for state in (tmp_path / "store").rglob(f"obs/{runner.DURABLE}/o.dat"):
                state.unlink()
            await asyncio.to_thread(own_nats.start)
            outcome = await stage.verified()
        assert outcome.session == session_id(attempt, 1)
        assert session.opened == [session_id(attempt, 1)]
    assert "goes on here" in caplog.text


async def test_s16_a_life_that_may_go_on_elsewhere_is_not_doubled(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A consumer that forgot what it gave out gives this runner what another has."""
    attempt = await stage.admit()
    life = {"run": stage.bus.run, "step": 3, "attempt": attempt, "group": 1, "session": session_id(attempt, 1)}
    await stage.bus.publish(SessionOpened(**life, template="t", sampling={}))
    async with stage.running():
        async with asyncio.timeout(20):
            while "goes on elsewhere" not in caplog.text:
                await asyncio.sleep(0.05)
        done = InfraFailed(**life, boundary=Boundary.ENGINE, cause=Cause.LOST, exception="X")
        await stage.bus.publish(done)
        await stage.all_acknowledged()
    assert await stage.events(VerifierResult, InfraFailed) == [done]
    assert stage.session.opened == []


async def test_s16_a_runner_whose_beats_are_late_starts_no_second_life(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "ACK_WAIT", 1.0)
    monkeypatch.setattr(runner, "_BEAT", 60.0)
    attempt = await stage.admit()
    async with stage.running(agent={"script": ["sleep 3", SOLVE]}):
        assert (await stage.verified()).session == session_id(attempt, 1)
        await stage.all_acknowledged()
    assert "goes on here" in caplog.text
    assert stage.session.opened == [session_id(attempt, 1)]


async def test_s16_a_life_is_one_runners(stage: Stage) -> None:
    """Two runners were given the same attempt at once: the journal's first word decides."""
    attempt = await stage.admit()
    async with stage.running(agent={"script": ["sleep 1", SOLVE]}):
        await stage.phase_began(Phase.AGENT, 1)
        begun = [p for p in await stage.events(RolloutPhase) if p.phase is Phase.QUEUE]
        assert await stage.bus.claim(begun[0]), "sent again by its own runner"
        assert not await stage.bus.claim(msgspec.structs.replace(begun[0], node="another"))
        assert (await stage.verified()).attempt == attempt


async def test_s15_no_queue_clock_runs_while_the_run_is_down(stage: Stage) -> None:
    admitted = msgspec.structs.replace(stage.admitted(queue=20.0), admitted=time.time() - 3600)
    await stage.bus.publish(admitted)
    await stage.bus.publish(RunStarted(run=stage.bus.run, config={}, config_digest="", code_version="", seed=0, resumed=1))
    async with stage.running():
        outcome = await stage.verified()
    assert outcome.reward == 1.0


async def test_s15_a_runner_that_starts_again_does_not_stop_the_queues_clock(stage: Stage) -> None:
    await stage.bus.publish(RunStarted(run=stage.bus.run, config={}, config_digest="", code_version="", seed=0))
    await stage.bus.publish(stage.admitted(queue=0.001))
    async with stage.running():
        failed = await stage.failed()
    assert (failed.boundary, failed.cause) == (Boundary.QUEUE, Cause.TIMEOUT)


async def test_limits_that_a_node_does_not_enforce_are_an_event(stage: Stage) -> None:
    async with stage.running(sandbox={"kind": "subprocess"}):
        await stage.admit()
        await stage.outcome()
    (event,) = await stage.events(LimitNotEnforced)
    assert event.limit == "all" and 'sandbox.kind = "bwrap"' in event.why
