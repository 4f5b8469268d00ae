"""FLOPs counted from shapes, beside torch's own counter of the same passes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rl360.trainer.flops import forward_flops, step_flops
from rl360.trainer.spec import Experts, ModelSpec

SPEC = ModelSpec(
    vocab=96, hidden=32, layers=2, heads=4, groups=2, head_dim=16, ffn_hidden=48, norm_eps=1e-6, rope_theta=1e4, context=256, tied=True
)


def test_a_layers_products_are_those_of_transformers(dense_folder):
    """Its attention counts the whole square and all rows of logits; ours half of it and the rows asked for."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(dense_folder, attn_implementation="eager")
    n = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, n, dtype=torch.long))
    half_square = SPEC.layers * 2 * n * n * SPEC.heads * SPEC.head_dim
    rotation_table = 2 * n * SPEC.head_dim // 2  # transformers makes its angles by a product
    assert forward_flops(SPEC, [n], n) + half_square == pytest.approx(counter.get_total_flops(), abs=rotation_table)


def test_only_the_chosen_experts_count():
    def sparse(count: int, topk: int) -> ModelSpec:
        experts = Experts(count=count, topk=topk, ffn_hidden=48, normalize_topk=True, layers=(True, True))
        return ModelSpec(**{**vars(SPEC), "experts": experts})

    router = 2 * 10 * 2 * SPEC.hidden
    assert forward_flops(sparse(8, 1), [10], 0) - 8 * router == forward_flops(SPEC, [10], 0)
    assert forward_flops(sparse(8, 2), [10], 0) - forward_flops(sparse(8, 1), [10], 0) == 2 * 10 * 2 * 3 * SPEC.hidden * 48


def test_the_backward_counts_twice():
    assert step_flops(SPEC, [10, 20], 5) == 3 * forward_flops(SPEC, [10, 20], 5)
    assert forward_flops(SPEC, [10, 10], 0) < forward_flops(SPEC, [20], 0), "attention stays inside a sequence"
