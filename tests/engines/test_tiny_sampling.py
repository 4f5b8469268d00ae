"""Sampling draws from softmax(logits / temperature) and reports exactly that log-prob."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rl360.engines.tiny.sampling import Temperatures, sample


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_frequencies_follow_the_distribution_at_its_temperature() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -30.0])
    rows = 40_000
    for temperature in (1.0, 0.5):
        tokens, _ = sample(logits.expand(rows, -1), Temperatures.of([temperature] * rows), generator())
        share = torch.bincount(tokens, minlength=4) / rows
        assert float((share - torch.softmax(logits / temperature, -1)).abs().max()) < 0.01
        assert share[3] == 0


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=30), st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.integers(0, 2**40))
def test_the_log_prob_is_always_that_of_the_token_sampled(values: list[float], temperature: float, seed: int) -> None:
    logits = torch.tensor([values, list(reversed(values))])
    tokens, logprobs = sample(logits, Temperatures.of([temperature, 1.0]), generator(seed))
    for row, token, logprob, t in zip(logits, tokens.tolist(), logprobs.tolist(), (temperature or 1.0, 1.0), strict=True):
        assert 0 <= token < len(values)
        assert abs(logprob - float(torch.log_softmax(row / t, -1)[token])) < 1e-5


def test_temperature_zero_is_greedy_row_by_row() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.9], [5.0, 0.0, 0.0]])
    tokens, logprobs = sample(logits, Temperatures.of([0.0, 0.0]), generator())
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).max(-1).values)


def test_one_seed_gives_one_stream() -> None:
    logits = torch.zeros(50, 100)
    a, b, c = (sample(logits, Temperatures.of([1.0] * 50), generator(s))[0] for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_tokens_of_no_probability_are_never_sampled() -> None:
    logits = torch.full((2000, 5), float("-inf"))
    logits[:, 1], logits[:, 3] = 0.0, 0.0
    tokens, logprobs = sample(logits, Temperatures.of([1.0] * 2000), generator())
    assert set(tokens.tolist()) == {1, 3}
    assert bool(torch.isfinite(logprobs).all())
