"""Log-probs, entropy and their gradient from logits that are kept once, against torch's own in float64."""

from __future__ import annotations

import pytest
import torch

from rl360.trainer.scores import token_scores


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [3, 1500])
def test_scores_and_gradients_are_those_of_log_softmax(rows, temperature):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, 50, generator=generator) * 5
    targets = torch.randint(0, 50, (rows,), generator=generator)
    of_logprob, of_entropy = torch.randn(rows, generator=generator), torch.randn(rows, generator=generator)
    exact = values.double().requires_grad_()
    logp = (exact / temperature).log_softmax(-1)
    wanted, spread = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (wanted * of_logprob + spread * of_entropy).sum().backward()
    leaf = values.clone().requires_grad_()
    found, entropy = token_scores(leaf * 1.0, targets, temperature, group=Alone(), index=0)
    (found * of_logprob + entropy * of_entropy).sum().backward()
    assert (found - wanted).abs().max() < 2e-5
    assert (entropy - spread).abs().max() < 2e-5
    assert (leaf.grad - exact.grad).abs().max() < 2e-5


def test_logits_far_from_zero_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    logprobs, entropy = token_scores(logits, torch.tensor([1, 2]), 1.0, group=Alone(), index=0)
    assert logprobs.tolist() == pytest.approx([-2e4, -1.0986123], rel=1e-6)
    assert entropy.tolist() == pytest.approx([0, 1.0986123], abs=1e-6)
