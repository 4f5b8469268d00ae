"""S11: the trainer's forward and its recompute use the recorded experts; gates and gradients are the router's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl360 import config
from rl360.sessions.routing import pack_rows
from rl360.trainer.batch import Microbatch, PackedBatch, Replay, TrainSample, pack, plan_batch, weigh
from rl360.trainer.expert_rows import ReplayError
from rl360.trainer.policy import Policy
from rl360.trainer.spec import ModelError

from .conftest import random_samples

REPLAY = config.Trainer(routing_replay=True, clip_grad=1e9)
RECOMPUTE = config.Trainer(routing_replay=True, clip_grad=1e9, recompute="full")


class Sampler:
    """transformers' model whose routers note what they choose, or choose what was noted: the oracle."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.forced: Tensor | None = None  # [t, MoE layers, topk]
        self.noted: list[Tensor] = []
        gates = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        for i, gate in enumerate(gates):
            gate.register_forward_hook(lambda gate, _, out, i=i: self._choose(gate, out, i))
        self.gates = gates

    def _choose(self, gate, out, layer: int):
        logits, scores, chosen = out
        if self.forced is not None:
            chosen = self.forced[:, layer].long()
            scores = logits.softmax(-1).gather(1, chosen)
            scores = scores / scores.sum(-1, keepdim=True)
        self.noted.append(chosen)
        return logits, scores, chosen

    def logprobs(self, ids: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of ids[1:], and the experts [t, layers, topk] of all tokens."""
        self.forced, self.noted = experts, []
        logp = self.model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return logp, torch.stack(self.noted, 1)


def recorded(samples: list[TrainSample], sampler: Sampler) -> list[TrainSample]:
    """The samples with the experts that `sampler` chooses: a row a token but the last."""
    found = []
    with torch.no_grad():
        for sample in samples:
            _, experts = sampler.logprobs(ids_of(sample))
            found.append(replace(sample, routing=pack_rows(experts[:-1].numpy().astype(np.uint8))))
    return found


def ids_of(sample: TrainSample) -> Tensor:
    return torch.from_numpy(sample.sample.ids.astype("int64"))


def perturb(policy: Policy, sampler: Sampler, scale: float) -> None:
    """Other router weights than those that sampled, the same in both."""
    weights = dict(policy.parameters())
    names = [name for name in weights if name.endswith("router.weight")]
    assert len(names) == len(sampler.gates)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, gate in zip(names, sampler.gates, strict=True):
            gate.weight.add_(torch.randn(gate.weight.shape, generator=generator) * scale)
            weights[name].copy_(gate.weight)


def recorded_shape(policy: Policy) -> Replay:
    assert policy.spec.experts is not None
    return Replay(policy.spec.experts.routing)


def batches_of(policy: Policy, samples: list[TrainSample], bound: int) -> list[PackedBatch]:
    plan = plan_batch(samples, dp=1, microbatch_tokens=bound)
    return [pack(m, recorded_shape(policy)) for m in plan.ranks[0]]


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in policy.parameters()}


@pytest.mark.parametrize("trainer", [REPLAY, RECOMPUTE], ids=["kept", "recomputed"])
def test_s11_forward_and_gradient_are_those_of_the_recorded_experts(trainer, moe_folder, groups):
    """Against autograd on transformers' own model, whose routers are made to choose the recorded experts."""
    sampler, policy = Sampler(moe_folder), Policy.from_hf(moe_folder, trainer, 1.0)
    samples, divisor = weigh(recorded(random_samples([40, 11, 25, 18]), sampler), "token_mean")
    perturb(policy, sampler, 0.3)
    batches = batches_of(policy, list(samples), 50)
    assert len(batches) > 1
    total = torch.zeros(())
    for sample in samples:
        assert sample.routing is not None
        rows = torch.from_numpy(sample.routing.array.copy())
        last = torch.tensor([[[0, 1]]], dtype=rows.dtype)
        logp, _ = sampler.logprobs(ids_of(sample), torch.cat([rows, last]))
        mask = torch.from_numpy(sample.sample.mask[1:] != 0)
        old = torch.from_numpy(sample.sample.logprobs[1:].copy())
        ratio = (logp.detach() - old).exp()
        unclipped = ratio.clamp(max=2.0) / ratio * (logp - old).exp() * sample.advantage
        total = total - (torch.minimum(unclipped, (logp - old).exp().clamp(0.8, 1.28) * sample.advantage) * mask).sum()
    (total / divisor).backward()
    result = policy.step(batches, divisor, version=0)
    assert result.sums["loss"] == pytest.approx(total.item(), abs=1e-5)
    norm = sum(float(p.grad.square().sum()) for p in sampler.model.parameters() if p.grad is not None) ** 0.5
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    found = gradients(policy)
    routers = [name for name in found if name.endswith("router.weight")]
    for name, gate in zip(routers, sampler.gates, strict=True):
        assert gate.weight.grad.abs().max() > 1e-6, "the gradient reaches the router"
        assert (found[name] - gate.weight.grad).abs().max() < 1e-6


def test_s11_log_probs_are_those_of_the_sampler_where_free_routing_is_not(moe_folder, groups):
    sampler, policy = Sampler(moe_folder), Policy.from_hf(moe_folder, REPLAY, 1.0)
    (sample,) = recorded(random_samples([60]), sampler)
    perturb(policy, sampler, 0.3)
    (batch,) = batches_of(policy, [sample], 100)
    (replayed,), (free,) = policy.logprobs([batch]), policy.logprobs([batch.routed_freely()])
    assert sample.routing is not None
    rows = torch.from_numpy(sample.routing.array.copy())
    with torch.no_grad():
        expected, chosen = sampler.logprobs(ids_of(sample), torch.cat([rows, rows[-1:]]))
        own, freely = sampler.logprobs(ids_of(sample))
    assert not torch.equal(chosen[:-1].sort(-1).values, freely[:-1].sort(-1).values), "the perturbed routers choose otherwise"
    mask = batch.mask[:-1]
    assert (replayed[:-1] - expected)[mask].abs().max() < 5e-6
    assert (free[:-1] - own)[mask].abs().max() < 5e-6
    assert (free - replayed).abs().max() > 1e-3


def test_s11_a_recompute_uses_the_rows_of_its_own_microbatch(moe_folder, groups):
    found = []
    for trainer in (REPLAY, RECOMPUTE):
        sampler, policy = Sampler(moe_folder), Policy.from_hf(moe_folder, trainer, 1.0)
        samples, divisor = weigh(recorded(random_samples([40, 11, 25, 33, 8, 19]), sampler), "token_mean")
        perturb(policy, sampler, 0.3)
        policy.logprobs(batches_of(policy, list(samples), 45))  # a pass without gradient leaves nothing behind
        policy.step(batches_of(policy, list(samples), 45), divisor, version=0)
        found.append(gradients(policy))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_s11_rows_where_the_router_would_choose_otherwise_are_counted(moe_folder, groups):
    sampler, policy = Sampler(moe_folder), Policy.from_hf(moe_folder, REPLAY, 1.0)
    samples, divisor = weigh(recorded(random_samples([40, 11]), sampler), "token_mean")
    batches = batches_of(policy, list(samples), 100)
    same = policy.step(batches, divisor, version=0).choices
    assert (same.rows, same.differ) == (40 + 11 - 2, 0), "one MoE layer; the dense one has no rows"
    policy.load_hf(moe_folder)
    perturb(policy, sampler, 0.3)
    differ = policy.step(batches, divisor, version=0).choices
    assert 0 < differ.differ < differ.rows == same.rows


def test_s11_rows_of_another_number_of_layers_or_tokens_never_reach_a_router(moe_folder, groups):
    policy = Policy.from_hf(moe_folder, REPLAY, 1.0)
    (batch,) = batches_of(policy, recorded(random_samples([20]), Sampler(moe_folder)), 100)
    assert batch.experts is not None
    for experts, message in ((batch.experts.repeat(1, 2, 1), "2 layers for 1"), (batch.experts[:-1], "19, 2. for 20 tokens")):
        with pytest.raises(ReplayError, match=message):
            policy.logprobs([replace(batch, experts=experts)])


def test_s11_a_policy_without_experts_has_nothing_to_replay(dense_folder, groups):
    with pytest.raises(ModelError, match="routing_replay = false"):
        Policy.from_hf(dense_folder, REPLAY, 1.0)


def test_replay_without_recorded_experts_is_refused_in_the_recipe():
    with pytest.raises(config.ConfigError, match=r"trainer\.routing_replay: needs engine\.routed_experts"):
        config.parse({"trainer": {"routing_replay": True}})
    assert config.parse({"trainer": {"routing_replay": True}, "engine": {"routed_experts": True}}).trainer.routing_replay


def test_an_empty_microbatch_is_replayed_too(moe_folder, groups):
    policy = Policy.from_hf(moe_folder, RECOMPUTE, 1.0)
    samples, divisor = weigh(recorded(random_samples([20, 30]), Sampler(moe_folder)), "token_mean")
    empty = pack(Microbatch(()), recorded_shape(policy))
    assert policy.step([*batches_of(policy, list(samples), 100), empty], divisor, version=0).grad_norm > 0
