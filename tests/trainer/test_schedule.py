"""The scheduler: both schedules on one path, exactly one outcome an attempt (S16), waves, deadlines (S15), resume (CASES 38)."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.agents.waves import wave_size
from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.config import BudgetSection, Waves
from rl360.trainer.draw import TaskRef, draw
from rl360.trainer.progress import Progress, PushGate, oldest
from rl360.trainer.rollouts import Rollouts, budgets
from rl360.trainer.schedule import EVAL_GROUPS, Scheduler, TaskPool
from tests.trainer.world import RUN, World, coin, config_of, failed, pool_of, verified


@pytest.mark.parametrize("schedule", ["sync", "one_step"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**20), kills=st.integers(0, 3), every=st.integers(1, 3), lost=st.integers(0, 3))
def test_a_run_ends_whatever_the_order_of_events_and_however_often_the_scheduler_is_killed_and_pushes_are_lost(
    schedule, seed, kills, every, lost, tmp_path_factory
):
    config = config_of(run={"schedule": schedule}, push={"every": every}, trainer={"max_staleness": every})
    world = World(config, tmp_path_factory.mktemp("w"), seed=seed, kills=kills, lost_pushes=lost)
    journal = world.play()
    opened = Counter((e.purpose, e.step) for e in journal.of(ev.StepOpened))
    assert opened == {
        (ev.Purpose.TRAIN, 0): 1,
        (ev.Purpose.TRAIN, 1): 1,
        (ev.Purpose.TRAIN, 2): 1,
        (ev.Purpose.EVAL, 0): 1,
        (ev.Purpose.EVAL, 2): 1,
        (ev.Purpose.EVAL, 3): 1,
    }
    assert Counter((e.purpose, e.step) for e in journal.of(ev.StepClosed)) == opened
    assert not any(world.pushes_in_flight), "a push met a rollout in flight"
    requested = {e.attempt for e in journal.of(ev.RolloutRequested)}
    assert {e.attempt for e in journal.of(ev.VerifierResult, ev.InfraFailed)} == requested
    late = {e.session for e in journal.of(ev.LateOutcome)}
    assert all(session.endswith(".2") for session in late), "the first outcome is never called late"
    assert len(journal.of(ev.RolloutAdmitted)) == len(requested) == 3 * 12 + 3 * 2
    for event in journal.of(ev.StepTrained):
        lag = max(
            (
                event.version - (not event.skipped) - world.sampled_at[e.attempt]
                for e in journal.of(ev.RolloutAdmitted)
                if e.step == event.step
            ),
            default=0,
        )
        assert lag <= oldest(schedule, every) <= config.trainer.max_staleness


def test_one_step_trains_on_data_one_version_back(tmp_path: Path):
    world = World(config_of(run={"schedule": "one_step", "steps": 4}), tmp_path, seed=3, behaviour=lambda a, rng: float(a.index % 2))
    journal = world.play()
    first = {e.step: world.sampled_at[e.attempt] for e in journal.of(ev.RolloutAdmitted) if e.purpose is ev.Purpose.TRAIN}
    assert first == {0: 0, 1: 0, 2: 1, 3: 2}
    assert [e.version for e in journal.of(ev.StepTrained)] == [1, 2, 3, 4]


def test_sync_trains_on_data_of_its_own_version(tmp_path: Path):
    world = World(config_of(run={"steps": 3}), tmp_path, seed=3, behaviour=lambda a, rng: float(a.index % 2))
    journal = world.play()
    assert {e.step: world.sampled_at[e.attempt] for e in journal.of(ev.RolloutAdmitted) if e.purpose is ev.Purpose.TRAIN} == {
        0: 0,
        1: 1,
        2: 2,
    }
    assert [e.version for e in journal.of(ev.StepOpened) if e.purpose is ev.Purpose.EVAL] == [0, 2, 3]


@pytest.mark.parametrize("schedule", ["sync", "one_step"])
def test_s21_a_step_without_survivors_is_skipped_and_the_next_one_opens(schedule: str, tmp_path: Path):
    world = World(config_of(run={"schedule": schedule}), tmp_path, behaviour=lambda a, rng: 1.0)
    journal = world.play()
    closed = [e for e in journal.of(ev.StepClosed) if e.purpose is ev.Purpose.TRAIN]
    assert [(e.step, e.skipped, e.why, e.kept) for e in closed] == [(i, True, "no group was kept", 0) for i in range(3)]
    assert {e.version for e in journal.of(ev.StepTrained)} == {0}


def test_cases_35_36_an_attempt_nobody_answers_for_is_given_up_at_its_outer_deadline_and_the_run_goes_on(tmp_path: Path):
    lost = {"t0-g001-a2", "e0-g500-a0"}
    world = World(config_of(), tmp_path, behaviour=lambda a, rng: None if a.attempt in lost else coin(a, rng))
    world.journal.now = 1e6
    for _ in range(2000):
        world.step_machines()
        world.step_others()
    assert world.in_flight == lost
    world.journal.now += 1000
    given_up = [e for e in world.play().of(ev.InfraFailed) if e.attempt in lost]
    assert {(e.session, e.boundary, e.cause) for e in given_up} == {(f"{a}.0", ev.Boundary.QUEUE, ev.Cause.TIMEOUT) for a in lost}
    assert "no runner reported it" in given_up[0].detail


# ---------------------------------------------------------------------------------------------------- gates


def opened(step: int, purpose: ev.Purpose = ev.Purpose.TRAIN) -> ev.StepOpened:
    spec = ev.GroupSpec(group=0 if purpose is ev.Purpose.TRAIN else EVAL_GROUPS, task="t", digest="d", domain="x", attempts=1)
    return ev.StepOpened(run=RUN, step=step, version=0, groups=(spec,), purpose=purpose)


def trained(step: int, version: int) -> ev.StepTrained:
    return ev.StepTrained(
        run=RUN,
        step=step,
        version=version,
        samples=1,
        tokens=1,
        divisor=1.0,
        loss=0.0,
        grad_norm=1.0,
        metrics={},
        seconds={},
        checkpoint="",
    )


def pushed(version: int, ok: bool = True) -> ev.WeightsPushed:
    result = ev.PushResult(generation="e", ok=ok)
    return ev.WeightsPushed(
        run=RUN, version=version, plan="", path="broadcast", attempt=1, checksum="", results=(result,), pause_seconds=0, seconds=0
    )


def test_sync_opens_a_step_when_the_version_before_it_is_held_by_an_engine():
    p = Progress()
    assert p.may_open("sync", 0)
    for event, may in (
        (opened(0), False),
        (verified("t0-g000-a0", 1.0), False),
        (trained(0, 1), False),
        (pushed(1, ok=False), False),
        (pushed(1), True),
    ):
        p.on(event)
        assert p.may_open("sync", 1) is may


def test_one_step_opens_the_next_step_while_the_last_one_trains_and_its_push_waits():
    p = Progress()
    p.on(opened(0))
    assert not p.may_open("one_step", 1)
    p.on(verified("t0-g000-a0", 1.0))
    assert p.may_open("one_step", 1)
    p.on(opened(1))
    p.on(trained(0, 1))
    assert not p.may_push("one_step", steps=5)
    p.on(failed("t1-g000-a0", step=1))
    assert p.may_push("one_step", steps=5)
    assert not p.may_open("one_step", 2), "step 2 would have tokens two versions back"
    p.on(pushed(1))
    assert p.may_open("one_step", 2)


def test_a_push_that_no_engine_took_is_due_until_one_succeeds_however_far_training_is():
    """one_step: step 2 waits for the version of step 0, whose push was lost; the version of step 1, made meanwhile, must go out."""
    p = Progress()
    for event in (opened(0), verified("t0-g000-a0", 1.0), opened(1), trained(0, 1), failed("t1-g000-a0", step=1), pushed(1, ok=False)):
        p.on(event)
    assert p.may_push("one_step", steps=5) and not p.may_open("one_step", 2)
    p.on(trained(1, 2))
    assert p.may_push("one_step", steps=5)
    p.on(pushed(2))
    assert p.may_open("one_step", 2) and not p.may_push("one_step", steps=5)


def test_every_nth_version_is_pushed_and_a_skipped_step_passes_on_the_one_before():
    p = Progress()
    for event in (opened(0), verified("t0-g000-a0", 1.0), trained(0, 1)):
        p.on(event)
    assert not p.may_push("sync", steps=9, every=2) and p.may_open("sync", 1, every=2)
    for event in (opened(1), verified("t1-g000-a0", 1.0, step=1)):
        p.on(event)
    assert not p.may_push("sync", steps=9, every=2), "a newer version is being made"
    p.on(trained(1, 1))  # skipped
    assert p.may_push("sync", steps=9, every=2) and not p.may_open("sync", 2, every=2)
    p.on(pushed(1))
    assert p.may_open("sync", 2, every=2)


def test_the_last_version_of_one_step_does_not_wait_for_a_step_that_never_opens():
    gate = PushGate("one_step", steps=1)
    for event in (opened(0), verified("t0-g000-a0", 1.0), trained(0, 1)):
        gate.on(event)
    assert gate.may_push()


def test_a_push_waits_for_evaluation_rollouts():
    gate = PushGate("sync", steps=5)
    for event in (opened(0), opened(0, ev.Purpose.EVAL), verified("t0-g000-a0", 1.0), trained(0, 1)):
        gate.on(event)
    assert not gate.may_push()
    gate.on(verified("e0-g500-a0", 1.0, group=500))
    assert gate.may_push()


def test_a_second_copy_of_an_event_changes_nothing():
    scheduler = Scheduler(RUN, config_of(run={"steps": 1}), pool_of(held_out=0))
    start = ev.RunStarted(run=RUN, config={}, config_digest="", code_version="", seed=0)
    [step] = scheduler.on(Recorded(1, 1.0, start))
    assert len(scheduler.on(Recorded(2, 1.0, step))) == 12
    assert scheduler.on(Recorded(3, 1.0, step)) == []


def test_the_end_needs_no_evaluation_when_there_is_none(tmp_path: Path):
    world = World(config_of(run={"steps": 2}, tasks={"eval_every": 0}), tmp_path)
    journal = world.play()
    assert journal.of(ev.RunFinished) == [ev.RunFinished(run=RUN, why="steps", steps=2)]
    assert {e.purpose for e in journal.of(ev.StepOpened)} == {ev.Purpose.TRAIN}


def test_a_finished_run_that_is_resumed_with_more_steps_goes_on_where_it_ended(tmp_path: Path):
    world = World(config_of(run={"steps": 2}), tmp_path)
    held = world.play().records
    longer = Scheduler(RUN, config_of(run={"steps": 3}), pool_of())
    decided = [e for r in held for e in longer.on(r)]
    missing = [e for e in decided if isinstance(e, ev.StepOpened) and e.step == 2 and e.purpose is ev.Purpose.TRAIN]
    assert len(missing) == 1
    assert missing[0].version == world.held


# ---------------------------------------------------------------------------------------------------- rollouts


def request(index: int, section: BudgetSection | None = None) -> ev.RolloutRequested:
    return ev.RolloutRequested(
        run=RUN,
        step=0,
        attempt=f"t0-g000-a{index}",
        group=0,
        index=index,
        task="t",
        digest="d",
        budgets=budgets(section or BudgetSection()),
    )


class Clockwork:
    """`Rollouts` with a journal's sequence and time."""

    def __init__(self, waves: Waves, lives: int = 3, engines: bool = True) -> None:
        self.rollouts, self.seq = Rollouts(waves, lives), 0
        if engines:
            self.on(ev.EngineReady(run=RUN, generation="e", url="", version=0, checksum=""))

    def on(self, *events: ev.Event, at: float = 0.0) -> None:
        for event in events:
            self.seq += 1
            self.rollouts.on(Recorded(self.seq, at, event))

    def due(self, now: float) -> list[ev.Event]:
        return list(self.rollouts.due(now))


def phase(attempt: str, phase: ev.Phase, end: float | None = None, life: int = 1) -> ev.RolloutPhase:
    return ev.RolloutPhase(run=RUN, step=0, attempt=attempt, group=0, session=f"{attempt}.{life}", phase=phase, start=0.0, end=end)


def test_case_41_waves_are_bounded_by_time_and_by_what_is_starting():
    clock = Clockwork(Waves(size=2, interval=1.0, max_starting=3))
    clock.on(*(request(i) for i in range(6)))
    assert [(e.attempt[-2:], e.wave) for e in clock.due(10.0)] == [("a0", 0), ("a1", 0)]
    assert clock.due(10.9) == []
    assert [(e.attempt[-2:], e.wave) for e in clock.due(11.0)] == [("a2", 1)]
    assert clock.due(20.0) == [], "three are starting"
    clock.on(phase("t0-g000-a0", ev.Phase.SETUP), at=20.0)
    assert clock.due(20.0) == []
    clock.on(phase("t0-g000-a0", ev.Phase.SETUP, end=1.0), failed("t0-g000-a1"), at=20.0)
    assert [e.attempt[-2:] for e in clock.due(21.0)] == ["a3", "a4"]


@given(size=st.integers(1, 9), limit=st.integers(1, 9), pending=st.integers(0, 30), starting=st.integers(0, 12), passed=st.floats(0, 3))
def test_case_41_a_wave_never_exceeds_any_bound(size, limit, pending, starting, passed):
    n = wave_size(Waves(size=size, interval=1.0, max_starting=limit), pending=pending, starting=starting, last=5.0, now=5.0 + passed)
    assert 0 <= n <= min(size, pending, max(0, limit - starting))
    assert n == 0 or passed >= 1.0


def test_case_41_groups_are_decided_while_waves_are_admitted(tmp_path: Path):
    world = World(config_of(waves={"size": 2, "interval": 1.0}, run={"steps": 1}), tmp_path)
    step = [r.event for r in world.play().records if r.event.step == 0]
    waves = [e.wave for e in step if isinstance(e, ev.RolloutAdmitted)]
    first = next(i for i, e in enumerate(step) if isinstance(e, ev.GroupDecided))
    assert max(Counter(waves).values()) == 2
    assert [e for e in step[first:] if isinstance(e, ev.RolloutAdmitted)], "the first group waited for the last wave"


def test_nothing_is_admitted_while_no_engine_is_ready():
    clock = Clockwork(Waves(), engines=False)
    clock.on(request(0))
    assert clock.due(1.0) == []
    clock.on(ev.EngineReady(run=RUN, generation="e", url="", version=0, checksum=""), ev.EngineLost(run=RUN, generation="e", cause=""))
    assert clock.due(2.0) == []
    clock.on(ev.EngineReady(run=RUN, generation="f", url="", version=0, checksum=""))
    assert len(clock.due(3.0)) == 1


SECOND = BudgetSection(queue=1, setup=1, agent=1, verify=1, collect=1, margin=1)


def test_s15_the_outer_deadline_is_the_sum_of_the_phases_and_the_margin():
    assert budgets(SECOND).outer == 6
    assert budgets(BudgetSection(queue=1, setup=1, agent=1, verify=1, collect=1, margin=1, outer=20)).outer == 20
    task = TaskRef(name="t", digest="d", domain="x", agent_timeout=0.5, verifier_timeout=math.inf)
    assert (budgets(SECOND, task).agent, budgets(SECOND, task).verify) == (0.5, 1)


def test_case_12_a_poison_attempt_that_used_up_its_lives_says_so():
    clock = Clockwork(Waves(), lives=2)
    clock.on(request(0, SECOND), request(1, SECOND))
    clock.due(100.0)
    clock.on(phase("t0-g000-a0", ev.Phase.AGENT, life=2), phase("t0-g000-a1", ev.Phase.VERIFY, life=1))
    assert clock.due(106.0) == []
    first, second = clock.due(106.5)
    assert (first.cause, second.cause) == (ev.Cause.ATTEMPTS_EXHAUSTED, ev.Cause.TIMEOUT)
    assert "last seen in phase verify of life 1" in second.detail
    assert clock.due(107.0) == []


def test_s15_no_clock_runs_while_the_whole_run_is_down():
    clock = Clockwork(Waves())
    clock.on(request(0, SECOND))
    clock.due(100.0)
    clock.on(ev.RunStarted(run=RUN, config={}, config_digest="", code_version="", seed=0, resumed=1), at=5000.0)
    assert clock.due(5006.0) == []
    assert len(clock.due(5006.5)) == 1


def test_the_life_of_a_session():
    assert (ev.life_of("t0-g000-a0.3"), ev.life_of("t0-g000-a0.0"), ev.life_of("odd")) == (3, 0, 0)


# ---------------------------------------------------------------------------------------------------- tasks


@given(size=st.integers(1, 12), count=st.integers(1, 15), seed=st.integers(0, 99), steps=st.integers(1, 8))
def test_case_38_every_epoch_draws_every_task_once_whatever_was_resumed(size, count, seed, steps):
    pool = pool_of(size, 0).train
    drawn = [t.name for step in range(steps) for t in draw(pool, seed=seed, step=step, count=count)]
    for start in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[start : start + size]) == sorted(t.name for t in pool)
    assert draw(pool, seed=seed, step=steps - 1, count=count) == draw(pool[::-1], seed=seed, step=steps - 1, count=count)


def test_epochs_and_seeds_differ_in_order():
    pool = pool_of(30, 0).train
    orders = {tuple(t.name for t in draw(pool, seed=seed, step=step, count=30)) for seed in range(3) for step in range(3)}
    assert len(orders) == 9
    with pytest.raises(ValueError, match="no task to draw from"):
        draw((), seed=0, step=0, count=1)


def test_case_38_a_resumed_scheduler_requests_the_same_attempts_again(tmp_path: Path):
    world = World(config_of(), tmp_path)
    records = world.play().records
    again = Scheduler(RUN, config_of(), pool_of())
    said = [e for r in records for e in again.on(r) if isinstance(e, ev.RolloutRequested)]
    assert said == [r.event for r in records if isinstance(r.event, ev.RolloutRequested)]


def test_an_evaluation_numbers_its_groups_apart():
    scheduler = Scheduler(RUN, config_of(), TaskPool(pool_of().train, pool_of().held_out))
    start = ev.RunStarted(run=RUN, config={}, config_digest="", code_version="", seed=0)
    train, evaluation = scheduler.on(Recorded(1, 1.0, start))
    assert [g.group for g in train.groups] == [0, 1, 2]
    assert [g.group for g in evaluation.groups] == [EVAL_GROUPS, EVAL_GROUPS + 1]
    assert evaluation.purpose is ev.Purpose.EVAL
