"""S23: reward before the filter, over valid attempts, every mean with its n; the outage stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.bus import events as ev
from rl360.trainer.metrics import Mean, belongs, step_metrics
from tests.trainer.world import RUN, World, config_of, failed, trajectory, verified


def decided(
    group: int, domain: str, rewards: list[float | None], kept: bool, reason: str = "", purpose: ev.Purpose = ev.Purpose.TRAIN
) -> ev.GroupDecided:
    fate = ev.Fate.TRAINED if kept else ev.Fate.DROPPED
    attempts = tuple(
        ev.AttemptDecision(attempt=ev.attempt_id(purpose, 0, group, i), fate=ev.Fate.MASKED, reason="sandbox/lost")
        if r is None
        else ev.AttemptDecision(attempt=ev.attempt_id(purpose, 0, group, i), fate=fate, raw_reward=float(r > 0), reward=r)
        for i, r in enumerate(rewards)
    )
    return ev.GroupDecided(run=RUN, step=0, group=group, domain=domain, kept=kept, reason=reason, attempts=attempts, purpose=purpose)


def opened(purpose: ev.Purpose = ev.Purpose.TRAIN) -> ev.StepOpened:
    specs = tuple(ev.GroupSpec(group=g, task="t", digest="d", domain=d, attempts=4) for g, d in enumerate(["fix", "look", "fix"]))
    return ev.StepOpened(run=RUN, step=0, version=0, groups=specs, purpose=purpose)


STEP = [
    opened(),
    failed("t0-g000-a3"),
    failed("t0-g001-a2", group=1, cause=ev.Cause.TIMEOUT),
    failed("t0-g001-a3", group=1, cause=ev.Cause.TIMEOUT),
    verified("t0-g001-a3", 1.0, group=1, life=2),  # late
    decided(0, "fix", [1.0, 0.7, 0.0, None], kept=True),
    decided(1, "look", [1.0, 1.0, None, None], kept=False, reason="all_pass"),
    trajectory("t0-g000-a0"),
]


def test_s23_every_mean_is_over_the_valid_and_says_its_n():
    flat = step_metrics(STEP, 0).flat()
    assert flat["reward/valid_mean"] == pytest.approx(3.7 / 5)
    assert flat["reward/valid_mean_n"] == 5
    assert flat["reward/raw_mean"] == pytest.approx(4 / 5)
    assert flat["reward/kept_mean"] == pytest.approx(1.7 / 3)
    assert flat["reward/kept_mean_n"] == 3
    assert (flat["reward/valid_mean/look"], flat["reward/valid_mean/look_n"]) == (1.0, 2)
    assert flat["reward/valid_mean/fix"] == pytest.approx(1.7 / 3)
    assert flat["legacy/unfiltered_mean"] == pytest.approx(3.7 / 8)


def test_s23_infrastructure_is_a_rate_by_cause_over_all_requested():
    flat = step_metrics(STEP, 0).flat()
    assert flat["infra/rate"] == 3 / 12
    assert (flat["infra/rate/sandbox/timeout"], flat["infra/rate/sandbox/lost"]) == (2 / 12, 1 / 12)
    assert {k: v for k, v in flat.items() if k.startswith("samples/")} == {
        "samples/requested": 12,
        "samples/valid": 5,
        "samples/masked": 3,
        "samples/stale": 0,
        "samples/kept": 3,
        "samples/trained": 0,
    }


def test_s23_trained_counts_only_after_the_optimizer_step():
    about = {
        "run": RUN,
        "step": 0,
        "version": 1,
        "samples": 3,
        "tokens": 9,
        "divisor": 9.0,
        "loss": 0.0,
        "grad_norm": 1.0,
        "seconds": {},
        "checkpoint": "",
    }
    trained = step_metrics([*STEP, ev.StepTrained(**about, metrics={"train/tis": 1.0})], 0)
    assert (trained.trained, trained.flat()["train/tis"]) == (3, 1.0)
    assert step_metrics([*STEP, ev.StepTrained(**about, metrics={}, skipped=True)], 0).trained == 0


def test_the_mean_of_nothing_is_left_out_and_says_n_0():
    flat = step_metrics([opened()], 0).flat()
    assert "reward/valid_mean" not in flat
    assert flat["reward/valid_mean_n"] == 0
    assert Mean.over([]).value is None


def test_an_evaluation_has_its_own_names_and_touches_no_training_metric():
    e = ev.Purpose.EVAL
    events = [*STEP, opened(e), decided(0, "fix", [1.0, 0.0, 0.0, None], kept=False, reason="eval", purpose=e), failed("e0-g000-a3")]
    flat = step_metrics(events, 0, e).flat()
    assert (flat["eval/valid_mean"], flat["eval/valid_mean_n"]) == (pytest.approx(1 / 3), 3)
    assert flat["eval/samples/requested"] == 12
    assert not any(k.startswith(("reward/", "samples/", "legacy/")) for k in flat)
    assert step_metrics(events, 0).flat() == step_metrics(STEP, 0).flat()


def test_events_know_their_purpose_and_a_step_must_have_been_opened():
    assert belongs(failed("e3-g500-a0")) is ev.Purpose.EVAL
    assert belongs(failed("t3-g000-a0")) is ev.Purpose.TRAIN
    with pytest.raises(ValueError, match="step 7"):
        step_metrics(STEP, 7)


def test_a_whole_run_adds_up(tmp_path: Path):
    events = [r.event for r in World(config_of(), tmp_path, seed=1).play().records]
    for closed in (e for e in events if isinstance(e, ev.StepClosed)):
        m = step_metrics(events, closed.step, closed.purpose)
        assert m.requested == closed.requested == closed.valid + closed.masked
        assert (m.valid.n, m.infra_total, m.kept.n) == (closed.valid, closed.infra, closed.kept)
        assert m.decided == m.groups
        assert m.cached_tokens == m.best_cached <= m.prompt_tokens
    assert step_metrics(events, 0).prompt_tokens > 0
