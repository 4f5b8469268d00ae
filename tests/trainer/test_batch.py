"""S21: the batch is all surviving samples; S20's divisor; packing for next-token prediction."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.bus import sample as wire
from rl360.trainer.batch import BatchError, Microbatch, TrainSample, pack, plan_batch, train_sample, weigh
from rl360.trainer.reduction import ReductionError, token_weights


def make_sample(attempt: str, mask: list[int], *, branch: int = 0, advantage: float = 0.5) -> TrainSample:
    m = np.array(mask, np.uint8)
    n = len(mask)
    sample = wire.make(
        attempt=attempt,
        branch=branch,
        ids=np.arange(10, 10 + n, dtype=np.int32),
        mask=m,
        logprobs=np.where(m, -np.arange(n), 0).astype(np.float32),
        versions=np.where(m, 7, -1).astype(np.int32),
    )
    return train_sample(wire.encode(sample), advantage=advantage)


masks = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(lambda m: [0, *m, 1])
batches = st.lists(masks, max_size=14).map(lambda ms: [make_sample(f"t0-g000-a{i}", m) for i, m in enumerate(ms)])


@settings(max_examples=60, deadline=None)
@given(samples=batches, dp=st.integers(1, 5), bound=st.integers(14, 60))
def test_s21_every_sample_is_used_once_and_ranks_have_equal_counts(samples, dp, bound):
    plan = plan_batch(samples, dp=dp, microbatch_tokens=bound)
    used = [s.attempt for rank in plan.ranks for m in rank for s in m.samples]
    assert sorted(used) == sorted(s.attempt for s in samples)
    assert {len(rank) for rank in plan.ranks} == {plan.microbatches}
    assert all(m.tokens <= bound for rank in plan.ranks for m in rank)


@settings(max_examples=60, deadline=None)
@given(samples=batches, dp=st.integers(1, 5))
def test_s21_ranks_are_balanced_by_tokens(samples, dp):
    loads = [sum(m.tokens for m in rank) for rank in plan_batch(samples, dp=dp, microbatch_tokens=60).ranks]
    longest = max(map(len, samples), default=0)
    assert max(loads) - min(loads) <= longest


@settings(max_examples=30, deadline=None)
@given(samples=batches, data=st.data())
def test_the_plan_is_a_function_of_the_set_of_samples(samples, data):
    shuffled = data.draw(st.permutations(samples))
    assert plan_batch(samples, dp=2, microbatch_tokens=30) == plan_batch(shuffled, dp=2, microbatch_tokens=30)


def test_case_9_fewer_samples_than_ranks_and_none_at_all():
    plan = plan_batch([make_sample("t0-g000-a0", [0, 1])], dp=4, microbatch_tokens=8)
    assert [len(rank) for rank in plan.ranks] == [1, 1, 1, 1]
    assert plan_batch([], dp=4, microbatch_tokens=8).microbatches == 0


def test_a_sample_longer_than_the_bound_is_alone_and_whole():
    samples = [make_sample("t0-g000-a0", [0] + [1] * 20), make_sample("t0-g000-a1", [0, 1])]
    plan = plan_batch(samples, dp=1, microbatch_tokens=8)
    assert [m.tokens for m in plan.ranks[0]] == [21, 2]


def test_packing_aligns_every_array_with_the_token_it_predicts():
    a, b = make_sample("t0-g000-a0", [0, 0, 1, 1], advantage=0.25), make_sample("t0-g000-a1", [0, 1, 0], advantage=-0.75)
    (a, b), _ = weigh([a, b], "sample_mean")
    p = pack(Microbatch((a, b)))
    assert p.ids.tolist() == [10, 11, 12, 13, 10, 11, 12]
    assert p.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert p.cu_seqlens.tolist() == [0, 4, 7]
    assert p.cu_seqlens.dtype == torch.int32
    assert p.targets.tolist() == [11, 12, 13, 0, 11, 12, 0]
    assert p.mask.tolist() == [False, True, True, False, True, False, False]
    assert p.sampler_logprobs.tolist() == [0, -2, -3, 0, -1, 0, 0]
    assert p.versions.tolist() == [-1, 7, 7, -1, 7, -1, -1]
    assert p.advantages.tolist() == [0, 0.25, 0.25, 0, -0.75, 0, 0]
    assert p.weights.tolist() == [0, 0.5, 0.5, 0, 1, 0, 0]
    assert p.max_seqlen == 4


def test_case_10_an_empty_microbatch_weighs_and_measures_nothing():
    p = pack(Microbatch(()))
    assert len(p.ids) == 2
    assert not p.mask.any()
    assert not p.weights.any()
    assert p.versions.tolist() == [-1, -1]
    assert p.samples == ()
    assert p.to("cpu").cu_seqlens.tolist() == [0, 2]


def test_a_sampled_first_token_or_an_infinite_advantage_is_refused():
    with pytest.raises(BatchError, match="first token"):
        make_sample("t0-g000-a0", [1, 1])
    with pytest.raises(BatchError, match="advantage is nan"):
        make_sample("t0-g000-a0", [0, 1], advantage=float("nan"))


def test_case_4_branches_of_one_attempt_share_its_vote():
    samples = [make_sample("t0-g000-a0", [0, 1, 1]), make_sample("t0-g000-a0", [0, 0, 1, 1], branch=1), make_sample("t0-g000-a1", [0, 1])]
    assert token_weights(samples, "sample_mean").weights == (0.25, 0.25, 1.0)
    assert token_weights(samples, "sample_mean").divisor == 2
    assert token_weights(samples, "token_mean").divisor == 5
    assert token_weights(samples, "constant", 16).divisor == 32


def test_case_5_nothing_to_divide_by_is_an_error_never_nan():
    with pytest.raises(ReductionError, match="an empty step is skipped"):
        token_weights([], "token_mean")
    with pytest.raises(ReductionError, match="t0-g000-a0"):
        token_weights([make_sample("t0-g000-a0", [0, 0])], "sample_mean")
    with pytest.raises(ReductionError, match="loss_constant"):
        token_weights([make_sample("t0-g000-a0", [0, 1])], "constant")
