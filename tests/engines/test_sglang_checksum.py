"""What SGLang answers to `/weights_checker` is computed here from the trainer's tensors, bit for bit (CASES 31)."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rl360.engines.sglang import checksum
from rl360.engines.sglang.checksum import checksums, mix_of, sha256_of
from rl360.engines.sglang.layout import held_by

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang"
HIDDEN, HEADS, KV, HEAD_DIM, FF, VOCAB = 8, 4, 2, 4, 12, 70


def recorded(version: str, name: str) -> dict[str, str]:
    return json.loads((FIXTURES / f"{version}.json").read_text())[name]["reply"]["ranks"][0]["checksums"]


@pytest.fixture(scope="module")
def served() -> dict[str, Tensor]:
    """The weights that the recorded servers held: a small random Qwen3, made from a seed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=1002,
        pad_token_id=1000,
    )
    return cast(Any, Qwen3ForCausalLM(config)).to(torch.bfloat16).state_dict()


@pytest.mark.parametrize(("version", "kind"), [("0.5.17", "fused_cuda"), ("0.5.23", "fused_cpu")])
def test_recorded_checksums_are_those_of_the_weights_that_were_served(served: dict[str, Tensor], version: str, kind: Any) -> None:
    (mine,) = checksums(served, kind=kind, tp=1, ep=1)
    theirs = recorded(version, "checksum_v0")
    assert len(mine) == 35
    assert {name: mine[name] for name in theirs} == theirs


def test_one_bit_changes_both_hashes() -> None:
    weights = torch.zeros(3 * 8192 + 5, dtype=torch.bfloat16)
    for digest in (sha256_of, mix_of):
        seen = {digest(weights)}
        for at in (0, 8191, 8192, len(weights) - 1):
            changed = weights.clone()
            changed[at] = 2.0**-130
            seen.add(digest(changed))
        assert len(seen) == 5


def test_long_tensors_are_hashed_in_pieces_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(5 * 8192 + 3, dtype=torch.int32)
    whole = mix_of(tensor)
    monkeypatch.setattr(checksum, "_CHUNK", 2 * 8192)
    assert mix_of(tensor) == whole


def model(experts: int = 0) -> dict[str, Tensor]:
    """A layer of every kind of weight, each number of its own."""
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": (KV * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV * HEAD_DIM, HIDDEN),
        layer + "self_attn.q_norm.weight": (HEAD_DIM,),
        layer + "self_attn.k_norm.weight": (HEAD_DIM,),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }
    if experts:
        shapes[layer + "mlp.gate.weight"] = (experts, HIDDEN)
    for prefix in [f"{layer}mlp.experts.{e}." for e in range(experts)] or [layer + "mlp."]:
        shapes |= {prefix + "gate_proj.weight": (FF, HIDDEN), prefix + "up_proj.weight": (FF, HIDDEN)}
        shapes[prefix + "down_proj.weight"] = (HIDDEN, FF)
    start, made = 0, dict[str, Tensor]()
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        made[name] = torch.arange(start, start + size).reshape(shape)
        start += size
    return made


def test_ranks_hold_their_heads_shares_and_rows() -> None:
    weights, layer = model(), "model.layers.0."
    ranks = [dict(held_by(weights, rank=rank, tp=2)) for rank in range(2)]
    q, k, v = (weights[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(ranks[1][layer + "self_attn.qkv_proj.weight"], torch.cat([q[8:], k[4:], v[4:]]))
    gate, up = weights[layer + "mlp.gate_proj.weight"], weights[layer + "mlp.up_proj.weight"]
    assert torch.equal(ranks[0][layer + "mlp.gate_up_proj.weight"], torch.cat([gate[:6], up[:6]]))
    assert torch.equal(ranks[1][layer + "mlp.down_proj.weight"], weights[layer + "mlp.down_proj.weight"][:, 6:])
    embed = torch.cat([r["model.embed_tokens.weight"] for r in ranks])
    assert torch.equal(embed[:VOCAB], weights["model.embed_tokens.weight"]) and len(embed) == 128 and not embed[VOCAB:].any()
    assert "model.layers.0.self_attn.k_proj.weight" not in ranks[0]


def test_fewer_key_heads_than_ranks_are_held_twice() -> None:
    weights, name = model(), "model.layers.0.self_attn."
    keys = [dict(held_by(weights, rank=r, tp=4))[name + "qkv_proj.weight"][HEAD_DIM : 2 * HEAD_DIM] for r in range(4)]
    key = weights[name + "k_proj.weight"]
    assert [torch.equal(k, key[:HEAD_DIM]) for k in keys] == [True, True, False, False]
    assert torch.equal(keys[3], key[HEAD_DIM:])


def test_experts_are_stacked_and_cut_by_ep_then_by_what_is_left_of_tp() -> None:
    weights, stem = model(experts=4), "model.layers.0.mlp.experts"
    together = [dict(held_by(weights, rank=r, tp=2)) for r in range(2)]
    apart = [dict(held_by(weights, rank=r, tp=2, ep=2)) for r in range(2)]
    gates = torch.stack([weights[f"{stem}.{e}.gate_proj.weight"] for e in range(4)])
    ups = torch.stack([weights[f"{stem}.{e}.up_proj.weight"] for e in range(4)])
    downs = torch.stack([weights[f"{stem}.{e}.down_proj.weight"] for e in range(4)])
    assert torch.equal(together[1][stem + ".w13_weight"], torch.cat([gates[:, 6:], ups[:, 6:]], dim=1))
    assert torch.equal(together[0][stem + ".w2_weight"], downs[:, :, :6])
    assert torch.equal(apart[1][stem + ".w13_weight"], torch.cat([gates, ups], dim=1)[2:])
    assert torch.equal(apart[0][stem + ".w2_weight"], downs[:2])
    assert torch.equal(apart[1]["model.layers.0.mlp.gate.weight"], weights["model.layers.0.mlp.gate.weight"])


def test_documented_examples_hold() -> None:
    assert doctest.testmod(checksum).failed == 0
