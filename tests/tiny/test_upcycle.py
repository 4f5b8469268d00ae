"""A mixture of experts made of a dense policy computes almost what the dense one does, and is the same for the same seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl360.config import ConfigError, Policy, parse
from rl360.launch import prepare
from rl360.sessions.routing import shape_of
from rl360.tiny.upcycle import Recipe, UpcycleError, upcycle

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DENSE = Policy().folder


def logits(folder: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(8, 600, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


def test_without_noise_the_logits_are_the_dense_ones(tmp_path):
    upcycle(DENSE, tmp_path, Recipe(experts=4, topk=2, noise=0.0), seed=0)
    assert (logits(tmp_path) - logits(DENSE)).abs().max() < 1e-4
    assert shape_of(json.loads((tmp_path / "config.json").read_text())).layers == 3


def test_wider_heads_say_the_same(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, root / "bench" / "wide_policy.py", tmp_path / "wide"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, check=True, timeout=120)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["head_dim"] == 64
    assert (logits(tmp_path / "wide") - logits(DENSE)).abs().max() < 1e-3


def test_noise_parts_the_experts_and_moves_the_policy_a_little(tmp_path):
    upcycle(DENSE, tmp_path, Recipe(experts=8, topk=2), seed=0)
    dense, sparse = logits(DENSE).log_softmax(-1), logits(tmp_path).log_softmax(-1)
    divergence = (dense.exp() * (dense - sparse)).sum(-1).mean()
    assert 1e-9 < divergence < 0.01, "nats a token"


def test_the_same_seed_makes_the_same_bytes(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        upcycle(DENSE, tmp_path / name, Recipe(experts=4, topk=2), seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_a_run_records_the_policy_that_was_made(tmp_path):
    config = prepare.upcycle(parse({"policy": {"experts": 4}}), tmp_path)
    assert config.policy == Policy(path=str(tmp_path / "policy"))
    assert {p.name for p in config.policy.folder.iterdir()} == {p.name for p in DENSE.iterdir()}
    assert prepare.upcycle(config, tmp_path) is config


def test_what_has_experts_already_is_refused(tmp_path):
    upcycle(DENSE, tmp_path / "a", Recipe(experts=4, topk=2), seed=0)
    with pytest.raises(UpcycleError, match="only a dense qwen3"):
        upcycle(tmp_path / "a", tmp_path / "b", Recipe(experts=4, topk=2), seed=0)
    with pytest.raises(ConfigError, match=r"policy\.experts_per_token"):
        parse({"policy": {"experts": 2, "experts_per_token": 3}})
