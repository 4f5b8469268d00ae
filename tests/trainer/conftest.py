"""Tiny random policies in Hugging Face layout (transformers is the oracle), and process groups of one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rl360.bus import sample as wire
from rl360.trainer.batch import TrainSample, train_sample

os.environ.setdefault("HF_HUB_OFFLINE", "1")
VOCAB = 96


def write_policy(folder: Path, *, moe: bool = False, tied: bool = True, seed: int = 3) -> Path:
    """A random Qwen3 (or Qwen3-MoE with a dense first layer) of about 20,000 parameters, saved by transformers."""
    import transformers

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    if moe:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [0]}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **experts))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    model.save_pretrained(folder)
    return folder


def random_samples(lengths: list[int], *, version: int = 0, seed: int = 0) -> list[TrainSample]:
    """Samples of random tokens: about half of them sampled, with log-probs near the uniform one and advantages around 0."""
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for i, n in enumerate(lengths):
        mask = (rng.random(n) < 0.5).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        value = wire.make(
            attempt=f"t0-g{i // 4:03d}-a{i % 4}",
            branch=0,
            ids=rng.integers(0, VOCAB, n).astype(np.int32),
            mask=mask,
            logprobs=np.where(mask, -np.log(VOCAB) + rng.normal(0, 0.1, n), 0).astype(np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
        )
        samples.append(train_sample(wire.encode(value), advantage=float(rng.normal())))
    return samples


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("moe"), moe=True, tied=False)


@pytest.fixture
def groups() -> Iterator[None]:
    """The trainer's platform and process groups, of one rank."""
    from rl360.trainer.distributed import process_groups

    torch.set_num_threads(1)
    with process_groups():
        yield
