"""K2-Horizon: norms in 4 groups, no norm of queries and keys; dense, and with first layers dense. transformers' Llama is the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rl360 import config
from rl360.trainer.batch import Microbatch, pack
from rl360.trainer.policy import Policy
from rl360.trainer.spec import ModelError, ModelSpec

from .conftest import VOCAB, random_samples
from .test_model import compared

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


class GroupedNorm(nn.Module):
    """Four quarters of a vector, each divided by its own root mean square."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        quarters = [q / (q.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() for q in x.chunk(4, -1)]
        return torch.cat(quarters, -1) * self.weight


def grouped(model: nn.Module) -> nn.Module:
    """Put grouped norms in place of all."""
    generator = torch.Generator().manual_seed(9)
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            parent, _, leaf = name.rpartition(".")
            weight = 1 + 0.1 * torch.randn(module.weight.shape, generator=generator)
            setattr(model.get_submodule(parent), leaf, GroupedNorm(weight))
    return model


@pytest.fixture
def policy_folder(tmp_path) -> tuple[Path, nn.Module]:
    import transformers

    torch.manual_seed(3)
    settings = transformers.LlamaConfig(**SHAPE, initializer_range=0.2, rope_theta=1e7)
    model = grouped(transformers.LlamaForCausalLM(settings))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "k2_horizon", "rms_norm_groups": 4, "rope_theta": 1e7}))
    return tmp_path, model


def test_log_probs_equal_the_oracles_and_weights_come_back(policy_folder, groups):
    folder, model = policy_folder
    policy = Policy.from_hf(folder, config.Trainer(), 1.0)
    batch = pack(Microbatch(tuple(random_samples([30, 17, 2, 44]))))
    (found,) = policy.logprobs([batch])
    assert (found - compared(model, batch)).abs().max() < 5e-6
    exported, held = dict(policy.export()), load_file(folder / "model.safetensors")
    assert exported.keys() == held.keys()
    assert all(torch.equal(exported[name], held[name]) for name in held)


def test_the_large_one_has_experts_after_its_first_layers(tmp_path):
    experts = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 3}
    shape = SHAPE | experts | {"num_hidden_layers": 61, "model_type": "k2_horizon", "rms_norm_groups": 4, "rope_theta": 1e7}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    spec = ModelSpec.read(tmp_path)
    assert spec.experts is not None
    assert spec.experts.layers == (False,) * 3 + (True,) * 58
    assert spec.experts.routing.layers * spec.experts.routing.topk == 464, "bytes of routing a token (S10)"


def test_groups_that_dont_divide_the_hidden_size_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "k2_horizon", "rms_norm_groups": 5, "rope_theta": 1e7}))
    with pytest.raises(ModelError, match="rms_norm_groups = 5 must divide"):
        ModelSpec.read(tmp_path)
