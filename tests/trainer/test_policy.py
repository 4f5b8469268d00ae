"""One optimizer step: the gradient is the plain weighted sum over tokens, however it is packed and split (S20)."""

from __future__ import annotations

import math

import pytest
import torch

from rl360 import config
from rl360.trainer.batch import Microbatch, PackedBatch, pack, plan_batch, weigh
from rl360.trainer.copies import CopyError, WeightCopies
from rl360.trainer.loss import LossError, merge_sums
from rl360.trainer.policy import Policy

from .conftest import random_samples


def batches_of(samples, bound: int) -> list[PackedBatch]:
    return [pack(m) for m in plan_batch(samples, dp=1, microbatch_tokens=bound).ranks[0]]


def gradients(policy: Policy) -> torch.Tensor:
    """As they are after a step: reduced, and not clipped when clip_grad is huge."""
    return torch.cat([p.main_grad.flatten() for _, p in policy.parameters()])


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in policy.parameters()])


UNCLIPPED = config.Trainer(clip_grad=1e9)


@pytest.mark.parametrize("reduction", ["token_mean", "sample_mean"])
@pytest.mark.parametrize("kind", ["dense_folder", "moe_folder"])
def test_s20_gradients_are_the_same_in_one_microbatch_or_many(kind, reduction, groups, request):
    samples, divisor = weigh(random_samples([40, 11, 25, 33, 8, 19]), reduction)
    found = []
    for bound in (1000, 60, 40):
        policy = Policy.from_hf(request.getfixturevalue(kind), UNCLIPPED, 1.0)
        policy.step(batches_of(samples, bound), divisor, version=0)
        found.append(gradients(policy))
    assert found[0].norm() > 1e-3
    for other in found[1:]:
        assert (other - found[0]).abs().max() < 1e-6


def test_s20_gradients_are_the_plain_sum_over_tokens(dense_folder, groups):
    """Against autograd on transformers' own model, with the surrogate written out by hand."""
    import transformers

    samples, divisor = weigh(random_samples([40, 11, 25]), "token_mean")
    policy = Policy.from_hf(dense_folder, UNCLIPPED, 1.0)
    result = policy.step(batches_of(samples, 50), divisor, version=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(dense_folder)
    total = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(sample.sample.ids.astype("int64"))
        logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(sample.sample.mask[1:] != 0)
        sampler = torch.from_numpy(sample.sample.logprobs[1:].copy())
        ratio = (logp.detach() - sampler).exp()
        unclipped = ratio.clamp(max=2.0) / ratio * (logp - sampler).exp() * sample.advantage
        clipped = (logp - sampler).exp().clamp(0.8, 1.28) * sample.advantage
        total = total - (torch.minimum(unclipped, clipped) * mask).sum()
    (total / divisor).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert result.sums["loss"] == pytest.approx(total.item(), abs=1e-5)


def test_an_empty_microbatch_changes_nothing(dense_folder, groups):
    samples, divisor = weigh(random_samples([20, 30]), "token_mean")
    found = []
    for extra in ([], [pack(Microbatch(()))]):
        policy = Policy.from_hf(dense_folder, UNCLIPPED, 1.0)
        policy.step([*batches_of(samples, 100), *extra], divisor, version=0)
        found.append(gradients(policy))
    assert torch.equal(*found)


def test_steps_lower_the_loss_of_their_own_batch(dense_folder, groups):
    policy = Policy.from_hf(dense_folder, config.Trainer(lr=1e-2, entropy_coef=0.01), 1.0)
    samples, divisor = weigh(random_samples([20, 30, 25, 18]), "token_mean")
    batches = batches_of(samples, 60)
    losses = [policy.step(batches, divisor, version=0).sums["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_metrics_name_the_agreement_of_trainer_and_sampler(dense_folder, groups):
    """Log-probs that the policy itself computed agree; only tokens of the trained version are compared."""
    policy = Policy.from_hf(dense_folder, config.Trainer(), 1.0)
    samples, divisor = weigh(random_samples([20, 30], version=4), "token_mean")
    (batch,) = batches_of(samples, 100)
    (own,) = policy.logprobs([batch])
    own_batch = PackedBatch(**{**vars(batch), "sampler_logprobs": own})
    assert policy.step([own_batch], divisor, version=5).agreement.mean is None
    policy.load_hf(dense_folder)
    result = policy.step([own_batch], divisor, version=4)
    assert result.agreement.tokens == batch.mask.sum()
    assert result.agreement.maximum < 1e-5 and result.agreement.kl / result.agreement.tokens < 1e-9
    off = PackedBatch(**{**vars(batch), "sampler_logprobs": own + 0.1})
    agreement = policy.step([off], divisor, version=5, old_logprobs=None).agreement
    assert agreement.mean is None
    agreement.add(own, off, [4])
    assert agreement.kl / agreement.tokens == pytest.approx(math.exp(-0.1) - 1 + 0.1, rel=1e-4)
    metrics = merge_sums(result.sums, result.maxima)
    assert metrics["train/tis"] == pytest.approx(1, abs=1e-5)
    assert 0 < metrics["train/entropy"] < math.log(96)


def test_a_log_prob_that_is_not_finite_leaves_the_weights_alone(dense_folder, groups):
    policy = Policy.from_hf(dense_folder, config.Trainer(), 1.0)
    samples, divisor = weigh(random_samples([20]), "token_mean")
    (batch,) = batches_of(samples, 100)
    before = weights(policy)
    with pytest.raises(LossError, match="finite"):
        policy.step([batch], divisor, version=0, old_logprobs=[torch.full((20,), math.nan)])
    assert torch.equal(weights(policy), before)


# ------------------------------------------------------------------------------------------------ S22: the behaviour policy


def test_s22_keep_old_actor_scores_each_token_under_the_version_that_sampled_it(dense_folder, groups):
    policy = Policy.from_hf(dense_folder, config.Trainer(lr=1e-2), 1.0)
    copies = WeightCopies(limit=2, device=torch.device("cpu"))
    old, new = random_samples([20, 30], version=0), random_samples([25, 15], version=1, seed=1)
    batches = batches_of([*old, *new], 60)
    copies.hold(0, policy.parameters())
    under_0 = policy.logprobs(batches)
    samples, divisor = weigh(old, "token_mean")
    policy.step(batches_of(samples, 100), divisor, version=0)
    copies.hold(1, policy.parameters())
    under_1 = policy.logprobs(batches)
    before = weights(policy)
    found = copies.logprobs(policy, batches, [0, 1])
    assert torch.equal(weights(policy), before), "the policy's own weights are back"
    for got, batch, zero, one in zip(found, batches, under_0, under_1, strict=True):
        expected = torch.where(batch.versions == 0, zero, one) * batch.mask
        assert torch.equal(got, expected)
        assert (zero - one).abs().max() > 1e-3


def test_s22_the_copies_are_bounded_and_a_lost_version_is_named(dense_folder, groups):
    policy = Policy.from_hf(dense_folder, config.Trainer(), 1.0)
    copies = WeightCopies(limit=2, device=torch.device("cpu"))
    for version in range(4):
        copies.hold(version, policy.parameters())
    assert copies.versions == [2, 3]
    with pytest.raises(CopyError, match="version 1 are not held"):
        copies.logprobs(policy, batches_of(random_samples([10], version=1), 100), [1])
