"""S20 and S22: one loss, however samples are packed; PPO-clip, TIS, KL and entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.bus import sample as wire
from rl360.config import Trainer
from rl360.trainer.batch import Microbatch, PackedBatch, TrainSample, pack, plan_batch, train_sample, weigh
from rl360.trainer.loss import LossError, LossSums, Objective, add_up, merge_sums, policy_loss

VOCAB = 11


def make_sample(rng: np.random.Generator, attempt: str, n: int, branch: int = 0) -> TrainSample:
    mask = np.concatenate([[0], rng.integers(0, 2, n), [1]]).astype(np.uint8)
    sample = wire.make(
        attempt=attempt,
        branch=branch,
        ids=rng.integers(0, VOCAB, n + 2).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -3 * rng.random(n + 2), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )
    return train_sample(wire.encode(sample), advantage=float(rng.normal()))


def run(parameter: torch.Tensor, batch: PackedBatch, objective: Objective) -> LossSums:
    """A model of one embedding table: the logits of a row depend on its own token and position."""
    logits = parameter[batch.ids] + 0.1 * batch.positions[:, None]
    logp = torch.log_softmax(logits, -1)
    chosen = logp.gather(-1, batch.targets[:, None])[:, 0]
    return policy_loss(chosen, batch, objective, ref_logprobs=chosen.detach() - 0.3, entropy=-(logp.exp() * logp).sum(-1))


def step(samples: list[TrainSample], reduction: str, dp: int, bound: int) -> tuple[float, torch.Tensor, dict[str, float]]:
    weighted, divisor = weigh(samples, reduction, 7.0)
    parameter = torch.linspace(-1, 1, VOCAB * VOCAB).reshape(VOCAB, VOCAB).requires_grad_()
    plan = plan_batch(weighted, dp=dp, microbatch_tokens=bound)
    parts = [run(parameter, pack(m), Objective(kl_coef=0.1, entropy_coef=0.01)) for rank in plan.ranks for m in rank]
    loss = sum(p.total for p in parts) / divisor
    loss.backward()
    return loss.item(), parameter.grad, merge_sums(*add_up(parts))


@pytest.mark.parametrize("reduction", ["sample_mean", "token_mean", "constant"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    dp=st.integers(1, 4),
    bound=st.integers(22, 90),
)
def test_s20_the_loss_is_the_same_however_samples_are_packed_split_or_spread(reduction, seed, lengths, dp, bound):
    rng = np.random.default_rng(seed)
    samples = [make_sample(rng, f"t0-g000-a{i // 2}", n, branch=i % 2) for i, n in enumerate(lengths)]
    loss, grad, metrics = step(samples, reduction, dp, bound)
    alone, grad_alone, metrics_alone = step(samples, reduction, 1, 1)  # one sample a microbatch
    assert math.isclose(loss, alone, abs_tol=1e-6)
    assert (grad - grad_alone).abs().max() < 1e-6
    assert metrics == pytest.approx(metrics_alone, abs=1e-6)


def rows(logp: list[float], sampler: list[float], advantages: list[float]) -> tuple[torch.Tensor, PackedBatch]:
    n = len(logp)
    mask = np.array([0] + [1] * n, np.uint8)
    sample = wire.make(
        attempt="t0-g000-a0",
        branch=0,
        ids=np.zeros(n + 1, np.int32),
        mask=mask,
        logprobs=np.array([0, *sampler], np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )
    batch = pack(Microbatch((train_sample(wire.encode(sample), advantage=1.0),)))
    batch.advantages[:n] = torch.tensor(advantages)
    return torch.tensor([*logp, math.nan], dtype=torch.float64, requires_grad=True), batch


def gradient(logp: torch.Tensor, batch: PackedBatch, objective: Objective, **given_logprobs: torch.Tensor) -> list[float]:
    """d(objective to maximise) / d(log-prob), by token."""
    policy_loss(logp, batch, objective, **given_logprobs).total.backward()
    return (-logp.grad)[:-1].tolist()


def test_s22_clip_stops_the_gradient_beyond_eps_and_only_on_the_improving_side():
    logp, batch = rows(
        [math.log(1.3), math.log(1.27), math.log(0.5), math.log(0.79), math.log(1.5), math.log(0.81)], [0.0] * 6, [1, 1, 1, -1, -1, -1]
    )
    assert gradient(logp, batch, Objective()) == pytest.approx([0, 1.27, 0.5, 0, -1.5, -0.81], abs=1e-6)


def test_s22_with_the_samplers_log_probs_the_ratio_is_truncated_once_not_squared():
    logp, batch = rows([math.log(5.0), math.log(0.1)], [0.0, 0.0], [-1, 1])
    assert gradient(logp, batch, Objective(tis_cap=2.0)) == pytest.approx([-2, 0.1], abs=1e-6)
    logp, batch = rows([math.log(0.1)], [0.0], [1])
    assert gradient(logp, batch, Objective(tis_floor=0.5)) == pytest.approx([0.5], abs=1e-6)


def test_s22_with_an_old_actor_tis_weighs_the_numerical_gap_alone():
    logp, batch = rows([math.log(0.6), math.log(0.6)], [math.log(0.1), math.log(0.4)], [1, 1])
    old = torch.tensor([math.log(0.5), math.log(0.5), math.nan], dtype=torch.float64)
    assert gradient(logp, batch, Objective(tis_cap=2.0), old_logprobs=old) == pytest.approx([2 * 1.2, 1.25 * 1.2], abs=1e-5)
    sums = policy_loss(logp, batch, Objective(tis_cap=2.0), old_logprobs=old).sums
    assert sums["tis"].item() == pytest.approx(2 + 1.25, abs=1e-6)
    assert sums["ratio"].item() == pytest.approx(2.4, abs=1e-6)


def test_s22_kl_and_entropy_enter_with_their_coefficients():
    logp, batch = rows([-1.0], [-1.0], [0])
    ref, entropy = torch.tensor([-1.5, math.nan]), torch.tensor([2.0, math.nan], requires_grad=True)
    out = policy_loss(logp, batch, Objective(kl_coef=0.5, entropy_coef=0.1), ref_logprobs=ref, entropy=entropy)
    assert out.total.item() == pytest.approx(0.5 * (math.exp(-0.5) + 0.5 - 1) - 0.1 * 2.0, abs=1e-6)
    for missing in ({"entropy": entropy}, {"ref_logprobs": ref}):
        with pytest.raises(LossError, match="needs"):
            policy_loss(logp, batch, Objective(kl_coef=0.5, entropy_coef=0.1), **missing)


def test_trainer_and_sampler_agree_gives_tis_one_and_no_clip():
    logp, batch = rows([-1.0, -2.0], [-1.0, -2.0], [1, -1])
    metrics = merge_sums(*add_up([policy_loss(logp, batch, Objective.of(Trainer()))]))
    assert metrics == {
        "train/tis": 1,
        "train/tis_clipped": 0,
        "train/ratio": 1,
        "train/clipped": 0,
        "train/abs_dlogp": 0,
        "train/max_abs_dlogp": 0,
        "train/tokens": 2,
    }


def test_case_10_an_empty_microbatch_adds_zero_loss_zero_gradient_and_no_metric():
    logp = torch.full((2,), math.nan, requires_grad=True)
    out = policy_loss(logp, pack(Microbatch(())), Objective())
    out.total.backward()
    assert out.total.item() == 0
    assert logp.grad.tolist() == [0, 0]
    assert all(v.item() == 0 for v in (*out.sums.values(), *out.maxima.values()))
    with pytest.raises(LossError, match="skipped"):
        merge_sums(*add_up([out]))


def test_a_log_prob_that_is_not_finite_stops_the_step():
    logp, batch = rows([math.inf], [-1.0], [1])
    with pytest.raises(LossError, match="not finite"):
        policy_loss(logp, batch, Objective())


def test_an_extreme_ratio_stays_finite():
    logp, batch = rows([-1.0], [-1e4], [-1])
    assert gradient(logp, batch, Objective()) == pytest.approx([-2])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sample_mean", (0.5 * (1 + 2) + (-3)) / 2), ("token_mean", (1 + 2 - 3) / 3), ("constant", (1 + 2 - 3) / (2 * 7.0))],
)
def test_s20_case_6_each_reduction_divides_by_what_it_counts(reduction, expected):
    """One attempt of two branches with a token each (advantage 1 and, so that they differ, 2), one of one token (advantage -3)."""
    samples = []
    for attempt, branch, advantage in (("t0-g000-a0", 0, 1.0), ("t0-g000-a0", 1, 2.0), ("t0-g000-a1", 0, -3.0)):
        mask = np.array([0, 1, 0], np.uint8)
        arrays = {"ids": np.zeros(3, np.int32), "mask": mask, "logprobs": -mask.astype(np.float32), "versions": mask.astype(np.int32) - 1}
        samples.append(train_sample(wire.encode(wire.make(attempt=attempt, branch=branch, **arrays)), advantage=advantage))
    weighted, divisor = weigh(samples, reduction, 7.0)
    batch = pack(Microbatch(weighted))
    total = policy_loss(batch.sampler_logprobs.clone().requires_grad_(), batch, Objective()).total
    assert total.item() / divisor == pytest.approx(-expected, abs=1e-6)
