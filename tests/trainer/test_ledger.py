"""The trainer's fold: what trains is exactly what survived, once all is decided; who is pushed to, and when."""

from __future__ import annotations

import pytest

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.trainer.commands import decode, encode
from rl360.trainer.ledger import FOLDED, Ledger, command
from tests.trainer.world import RUN, World, config_of, failed, trajectory, verified


def feed(ledger: Ledger, *events: ev.Event, seq: int = 1) -> None:
    for i, event in enumerate(events, start=seq):
        ledger.on(Recorded(i, 1000.0 + i, event))


@pytest.mark.parametrize("schedule", ["sync", "one_step"])
@pytest.mark.parametrize("seed", range(4))
def test_s21_each_step_gets_all_survivors_the_moment_its_last_group_is_decided(schedule, seed, tmp_path):
    """Against a whole run in memory, whose own trainer says what it trained on."""
    config = config_of(run={"schedule": schedule})
    journal = World(config, tmp_path, seed=seed).play()
    ledger, step, version = Ledger(RUN, config), 0, 0
    for record in journal.records:
        if isinstance(record.event, ev.StepTrained):
            batch = ledger.batch(step, version)
            assert batch is not None, "everything is decided before the step is trained"
            assert len(batch.refs) == record.event.samples
            assert batch.divisor == record.event.divisor
            assert bool(batch.why) == record.event.skipped
            step, version = step + 1, record.event.version
            ledger.done(step - 1)
        if isinstance(record.event, FOLDED):
            ledger.on(record)
    assert step == config.run.steps


def opened(groups: int = 1, attempts: int = 2, step: int = 0, version: int = 0) -> ev.StepOpened:
    specs = tuple(ev.GroupSpec(group=g, task="t", digest="d", domain="fix", attempts=attempts) for g in range(groups))
    return ev.StepOpened(run=RUN, step=step, version=version, groups=specs)


def decided(step: int = 0, group: int = 0, kept: bool = True) -> ev.GroupDecided:
    attempts = tuple(
        ev.AttemptDecision(
            attempt=f"t{step}-g{group:03d}-a{i}", fate=ev.Fate.TRAINED if kept else ev.Fate.DROPPED, reward=float(i), advantage=i - 0.5
        )
        for i in range(2)
    )
    return ev.GroupDecided(run=RUN, step=step, group=group, domain="fix", kept=kept, reason="" if kept else "all_fail", attempts=attempts)


def over(step: int = 0, version: int = 0) -> list[ev.Event]:
    names = [f"t{step}-g000-a{i}" for i in range(2)]
    samples = [trajectory(a, step=step, sampled=3 + i, version=version) for i, a in enumerate(names)]
    return [*(verified(a, 1.0, step=step) for a in names), *samples]


def test_nothing_trains_before_every_group_is_decided():
    ledger = Ledger(RUN, config_of())
    feed(ledger, opened(groups=2), *over(), decided())
    assert ledger.batch(0, 0) is None
    feed(ledger, decided(group=1, kept=False), seq=20)
    batch = ledger.batch(0, 0)
    assert batch is not None
    assert [ref.attempt for ref in batch.refs] == ["t0-g000-a0", "t0-g000-a1"]
    assert batch.divisor == 7


def test_s21_no_survivor_skips_and_says_why():
    ledger = Ledger(RUN, config_of())
    feed(ledger, opened(groups=2), failed("t0-g000-a0"), decided(kept=False), decided(group=1, kept=False))
    batch = ledger.batch(0, 0)
    assert batch is not None
    assert (batch.refs, batch.why) == ((), "no sample survived: all_fail 2")


def test_s24_what_is_too_stale_at_consumption_is_dropped_and_named():
    config = config_of(trainer={"max_staleness": 1})
    ledger = Ledger(RUN, config)
    feed(ledger, opened(step=3, version=2), *over(step=3, version=2), decided(step=3))
    assert len(ledger.batch(3, 3).refs) == 2
    late = ledger.batch(3, 4)
    assert (late.refs, late.stale) == ((), ("t3-g000-a0/0", "t3-g000-a1/0"))
    assert "stale at consumption 2" in late.why


def test_s21_the_command_gives_every_rank_equally_many_microbatches_and_survives_the_wire():
    ledger = Ledger(RUN, config_of())
    feed(ledger, opened(), *over(), decided())
    train = command(ledger.batch(0, 0), dp=3, microbatch_tokens=8)
    assert [len(rank) for rank in train.ranks] == [1, 1, 1]
    assert sorted(ref.attempt for rank in train.ranks for m in rank for ref in m) == ["t0-g000-a0", "t0-g000-a1"]
    assert decode(encode(train)) == train


# ------------------------------------------------------------------------------------------------ push


def joined(*names: str) -> list[ev.Event]:
    return [ev.EngineJoined(run=RUN, generation=n, url=f"http://{n}") for n in names]


def pushed(version: int, *names: str, failed: str = "") -> ev.WeightsPushed:
    results = tuple(ev.PushResult(generation=n, ok=n != failed, checksum="c") for n in names)
    return ev.WeightsPushed(
        run=RUN, version=version, plan="p", path="broadcast", attempt=1, checksum="c", results=results, pause_seconds=0, seconds=0
    )


def trained(step: int, version: int) -> ev.StepTrained:
    return ev.StepTrained(
        run=RUN, step=step, version=version, samples=1, tokens=1, divisor=1, loss=0, grad_norm=0, metrics={}, seconds={}, checkpoint=""
    )


def test_engines_that_join_get_the_starting_policy_at_once():
    ledger = Ledger(RUN, config_of())
    assert ledger.push(0, -1) is None
    feed(ledger, *joined("a", "b"))
    order = ledger.push(0, -1)
    assert order is not None
    assert (order.version, order.step, set(order.engines), order.attempt) == (0, -1, {"a", "b"}, 1)
    feed(ledger, pushed(0, "a", "b"), seq=5)
    assert ledger.push(0, -1) is None
    feed(ledger, *joined("c"), seq=6)
    late = ledger.push(0, -1)
    assert (set(late.engines), late.attempt) == ({"c"}, 2)


def test_a_new_version_goes_to_all_when_no_rollout_is_in_flight():
    config = config_of(run={"schedule": "sync"})
    ledger = Ledger(RUN, config)
    feed(ledger, *joined("a", "b"), pushed(0, "a", "b"), opened())
    assert ledger.push(1, 0) is None, "rollouts of the step are in flight"
    feed(ledger, *over(), trained(0, 1), seq=10)
    order = ledger.push(1, 0)
    assert (order.version, order.step, set(order.engines)) == (1, 0, {"a", "b"})
    feed(ledger, pushed(1, "a", "b", failed="b"), seq=20)
    assert ledger.push(1, 0) is None, "the one that failed is fenced: it comes back as another generation"


def test_one_step_joiners_get_what_the_others_serve_until_the_next_version_may_go():
    config = config_of(run={"schedule": "one_step", "steps": 3})
    ledger = Ledger(RUN, config)
    feed(ledger, *joined("a"), pushed(0, "a"), opened(), *over(), opened(step=1), trained(0, 1), *joined("b"))
    order = ledger.push(1, 0)
    assert (order.version, set(order.engines), order.step) == (0, {"b"}, -1)
    feed(ledger, pushed(0, "b"), *over(step=1), seq=30)
    assert ledger.push(1, 0).version == 1


def test_no_older_version_is_pushed_while_a_lost_step_is_made_again():
    ledger = Ledger(RUN, config_of())
    feed(ledger, *joined("a"), pushed(0, "a"), opened(), *over(), trained(0, 1), pushed(1, "a"), *joined("b"))
    assert ledger.push(0, -1) is None


def test_folding_a_journal_keeps_no_samples_of_finished_steps(tmp_path):
    journal = World(config_of(), tmp_path, seed=1).play()
    ledger = Ledger(RUN, config_of())
    ledger.done(100)
    for record in journal.records:
        if isinstance(record.event, FOLDED):
            ledger.on(record)
    assert ledger.batch(0, 0) is None
    assert not ledger._decided
