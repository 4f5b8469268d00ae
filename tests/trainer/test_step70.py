"""Step 70: of 56 samples that the filter kept, 23 were masked. What the old rules made of it, and what ours make of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl360.bus import events as ev
from rl360.bus import sample as wire
from rl360.trainer import legacy
from rl360.trainer.batch import Microbatch, TrainSample, pack, train_sample, weigh
from rl360.trainer.groups import GroupContext, Rules, decide_group
from rl360.trainer.loss import Objective, add_up, merge_sums, policy_loss
from rl360.trainer.metrics import step_metrics
from rl360.trainer.outcomes import AttemptOutcome
from tests.trainer.world import RUN, failed, trajectory, verified

GROUPS, SIZE = 7, 8  # 56 samples
SCALE = 33 / 56


FIVE, FOUR = [1.0, 1.0, 1.0, 0.75, 0.0], [1.0, 1.0, 1.0, 0.0]
"""Valid rewards of a group; both average 0.75."""

GIVEN: list[list[float | None]] = [[*valid, *[None] * (SIZE - len(valid))] for valid in [FIVE] * 5 + [FOUR] * 2]
REWARDS = [r for g in GIVEN for r in g]
VALID = [r for r in REWARDS if r is not None]


def decide() -> list[ev.GroupDecided]:
    decided = []
    for g, rewards in enumerate(GIVEN):
        outcomes = []
        for i, reward in enumerate(rewards):
            attempt = ev.attempt_id(ev.Purpose.TRAIN, 70, g, i)
            about = {"step": 70, "group": g}
            outcomes.append(
                AttemptOutcome(attempt, failed(attempt, **about))
                if reward is None
                else AttemptOutcome(attempt, verified(attempt, reward, **about), (trajectory(attempt, **about),))
            )
        spec = ev.GroupSpec(group=g, task=f"t{g}", digest="d", domain="fix", attempts=SIZE)
        decided.append(decide_group(spec, outcomes, Rules(), GroupContext(run=RUN, step=70, trained_on=0)))
    return decided


def test_the_step_is_the_one_of_the_story():
    assert (len(REWARDS), REWARDS.count(None), len(VALID)) == (56, 23, 33)
    assert np.mean(VALID) == 0.75
    assert all(g.kept for g in decide())


def samples(advantages: list[float]) -> list[TrainSample]:
    """One for each advantage, of 2 + i % 3 sampled tokens."""
    made = []
    for i, advantage in enumerate(advantages):
        n = 3 + i % 3
        mask = np.array([0] + [1] * (n - 1), np.uint8)
        sample = wire.make(
            attempt=f"t70-g{i:03d}-a0",
            branch=0,
            ids=np.full(n, i % 5, np.int32),
            mask=mask,
            logprobs=np.where(mask, -1.5, 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )
        made.append(train_sample(wire.encode(sample), advantage=advantage))
    return made


def gradient(divisor: float | None = None) -> tuple[torch.Tensor, dict[str, float]]:
    """Of the step's loss over the 33 valid samples; `divisor` replaces ours."""
    given = [a.advantage for g in decide() for a in g.attempts if a.advantage is not None]
    weighted, ours = weigh(samples(given), "sample_mean")
    batch = pack(Microbatch(weighted))
    shift = torch.zeros(5, requires_grad=True)
    logp = batch.sampler_logprobs + shift[batch.targets] - shift[batch.targets].detach()
    sums = policy_loss(logp, batch, Objective())
    (sums.total / (divisor or ours)).backward()
    return shift.grad, merge_sums(*add_up([sums]))


def test_step70_legacy_gradients_are_scaled_by_0589_and_ours_by_1():
    ours, _ = gradient()
    old, _ = gradient(legacy.sample_mean_divisor(REWARDS))
    assert old.norm() / ours.norm() == pytest.approx(SCALE, abs=1e-6)
    assert legacy.gradient_scale(REWARDS) == pytest.approx(0.589, abs=5e-4)
    assert gradient(33.0)[0].tolist() == ours.tolist(), "our divisor is the 33 valid samples: scale 1"


def test_step70_legacy_baseline_is_044_against_075_so_031_on_every_advantage_and_ours_is_0():
    baseline = legacy.whole_batch_baseline(REWARDS)
    assert baseline == pytest.approx(0.75 * SCALE)
    assert round(baseline, 2) == 0.44
    old = [a for a in legacy.whole_batch_advantages(REWARDS) if a is not None]
    assert np.mean(old) == pytest.approx(0.75 * 23 / 56), "+0.31"
    ours = [a.advantage for g in decide() for a in g.attempts if a.advantage is not None]
    assert np.mean(ours) == pytest.approx(0, abs=1e-9)


def test_step70_the_kept_mean_is_075_under_our_rules():
    flat = step_metrics(step_events(decide()), 70).flat()
    assert flat["reward/kept_mean"] == 0.75
    assert flat["reward/kept_mean_n"] == 33


def test_step70_tis_is_1_not_1_minus_masked_over_kept():
    _, metrics = gradient()
    assert metrics["train/tis"] == pytest.approx(1)
    assert legacy.logged_mean([1.0] * 33, masked=23) == pytest.approx(1 - 23 / 56)


def step_events(decided: list[ev.GroupDecided], dropped: tuple[ev.GroupDecided, ...] = ()) -> list[ev.Event]:
    groups = (*decided, *dropped)
    specs = tuple(ev.GroupSpec(group=g.group, task="t", digest="d", domain=g.domain, attempts=len(g.attempts)) for g in groups)
    lost = [failed(a.attempt, step=70, group=g.group) for g in groups for a in g.attempts if a.reason == "sandbox/lost"]
    return [ev.StepOpened(run=RUN, step=70, version=0, groups=specs), *lost, *groups]


def test_step70_the_logged_mean_keeps_its_level_and_the_outage_shows_beside_it():
    """With 25 dropped groups beside, half of each lost and the rest passed, the old mean falls to 0.49 and ours stays where it was."""
    dropped = []
    for g in range(GROUPS, GROUPS + 25):
        attempts = tuple(
            ev.AttemptDecision(attempt=f"t70-g{g:03d}-a{i}", fate=ev.Fate.MASKED, reason="sandbox/lost")
            if i < 4
            else ev.AttemptDecision(attempt=f"t70-g{g:03d}-a{i}", fate=ev.Fate.DROPPED, raw_reward=1.0, reward=1.0)
            for i in range(8)
        )
        dropped.append(ev.GroupDecided(run=RUN, step=70, group=g, domain="fix", kept=False, reason="all_pass", attempts=attempts))
    m = step_metrics(step_events(decide(), tuple(dropped)), 70)
    flat = m.flat()
    assert flat["legacy/unfiltered_mean"] == pytest.approx(0.49, abs=5e-3)
    assert flat["legacy/unfiltered_mean"] == pytest.approx(legacy.unfiltered_mean([*REWARDS, *([None] * 4 + [1.0] * 4) * 25]))
    assert flat["reward/valid_mean"] == pytest.approx((33 * 0.75 + 100) / 133)
    assert flat["reward/valid_mean_n"] == 133
    assert flat["infra/rate"] == 123 / 256
