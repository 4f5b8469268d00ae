"""The policy's shape and weights against transformers, the oracle: logits, names and layouts."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl360 import config
from rl360.trainer import hf
from rl360.trainer.batch import Microbatch, pack
from rl360.trainer.policy import Policy
from rl360.trainer.spec import ModelError, ModelSpec

from .conftest import random_samples, write_policy


def oracle_logprobs(folder: Path, batch, temperature: float = 1.0) -> torch.Tensor:
    """Of the sampled targets, [T], each sequence by itself through transformers."""
    import transformers

    return compared(transformers.AutoModelForCausalLM.from_pretrained(folder), batch, temperature)


def compared(model: torch.nn.Module, batch, temperature: float = 1.0) -> torch.Tensor:
    out = torch.zeros(len(batch.ids))
    bounds = batch.cu_seqlens.tolist()
    with torch.no_grad():
        for lo, hi in itertools.pairwise(bounds):
            logp = (model(batch.ids[lo:hi][None]).logits[0] / temperature).log_softmax(-1)
            out[lo:hi] = logp.gather(-1, batch.targets[lo:hi, None])[:, 0]
    return out * batch.mask


@pytest.mark.parametrize("kind", ["dense_folder", "moe_folder"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_equal_transformers(kind, temperature, groups, request):
    folder = request.getfixturevalue(kind)
    policy = Policy.from_hf(folder, config.Trainer(), temperature)
    batch = pack(Microbatch(tuple(random_samples([30, 17, 2, 44]))))
    (got,) = policy.logprobs([batch])
    assert (got - oracle_logprobs(folder, batch, temperature)).abs().max() < 5e-6


@pytest.mark.parametrize("kind", ["dense_folder", "moe_folder"])
def test_export_gives_back_every_tensor_bit_for_bit(kind, groups, request):
    folder = request.getfixturevalue(kind)
    policy = Policy.from_hf(folder, config.Trainer(), 1.0)
    exported, held = dict(policy.export()), load_file(folder / "model.safetensors")
    assert exported.keys() == held.keys()
    assert all(torch.equal(exported[name], held[name]) for name in held)


def test_exported_tensors_are_copies(dense_folder, groups):
    policy = Policy.from_hf(dense_folder, config.Trainer(), 1.0)
    exported = dict(policy.export())
    with torch.no_grad():
        for _, parameter in policy.parameters():
            parameter.zero_()
    assert all(t.abs().sum() > 0 for t in exported.values())


def test_experts_that_are_not_normalized_over_the_chosen_ones(tmp_path, groups):
    folder = write_policy(tmp_path / "p", moe=True)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"norm_topk_prob": False}))
    batch = pack(Microbatch(tuple(random_samples([30, 17]))))
    (got,) = Policy.from_hf(folder, config.Trainer(), 1.0).logprobs([batch])
    assert (got - oracle_logprobs(folder, batch)).abs().max() < 5e-6


def test_join_and_split_are_inverse(dense_folder):
    spec = ModelSpec.read(dense_folder)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    fused = torch.randn((spec.heads + 2 * spec.groups) * spec.head_dim, spec.hidden)
    parts = hf.split(name, fused, spec)
    assert [len(p) for p in parts] == [spec.heads * spec.head_dim, spec.groups * spec.head_dim, spec.groups * spec.head_dim]
    assert torch.equal(hf.join(name, parts, spec), fused)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"head_dim": None}, "number"),
    ],
)
def test_a_config_that_would_be_computed_otherwise_is_refused(dense_folder, tmp_path, change, message):
    settings = json.loads((dense_folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message):
        ModelSpec.read(tmp_path)


def test_a_missing_or_broken_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelSpec.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        ModelSpec.read(tmp_path)


def broken(change: str, source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    weights = target / "model.safetensors"
    if change == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
        return target
    tensors = load_file(weights)
    if change == "missing":
        del tensors["model.norm.weight"]
    elif change == "extra":
        tensors["model.extra.weight"] = torch.zeros(1)
    else:
        tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, weights)
    return target


@pytest.mark.parametrize(("change", "message"), [("missing", "missing"), ("extra", "no part"), ("shape", "shape"), ("cut", "safetensors")])
def test_weights_that_dont_fit_are_refused_by_name(change, message, dense_folder, tmp_path, groups):
    folder = broken(change, dense_folder, tmp_path / "p")
    with pytest.raises(ModelError, match=message):
        Policy.from_hf(folder, config.Trainer(), 1.0)
