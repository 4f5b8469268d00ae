"""The tiny engine's forward against transformers, and what of a model folder is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl360.engines.checksum import checksum_of, combined
from rl360.engines.tiny.model import Model, Piece, check_order
from rl360.engines.tiny.shape import ModelError, read_shape
from rl360.engines.tiny.weights import load_weights
from tests.engines.tiny_models import Oracle, dense, model_of, moe, prompt, weights_of

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["dense", "untied", "moe"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    return moe(folder) if request.param == "moe" else dense(folder, tied=request.param == "dense")


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) < TOLERANCE


def test_logits_equal_transformers_through_prefill_reuse_and_decode(oracle: Oracle) -> None:
    model = model_of(oracle)
    a, b, more = prompt(40, 1), prompt(11, 2), prompt(9, 3)
    logits = model.prefill([Piece(5, 0, a), Piece(2, 0, b)])  # slots out of order, lengths unequal
    assert close(logits[0], oracle.logits(a)[-1])
    assert close(logits[1], oracle.logits(b)[-1])
    assert close(model.prefill([Piece(5, 40, more)])[0], oracle.logits(a + more)[-1]), "a second turn on cached rows"
    logits = model.decode(torch.tensor([7, 9]), torch.tensor([2, 5]), torch.tensor([11, 49]))
    assert close(logits[0], oracle.logits([*b, 7])[-1])
    assert close(logits[1], oracle.logits([*a, *more, 9])[-1])


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [1, 2, 3], [0, 2, 3], [0, 7], [3]])
def test_a_decode_batch_never_mixes_slots_up(oracle: Oracle, slots: list[int]) -> None:
    """Whether the cache is read as a range, as a range with idle rows between, or gathered."""
    model = model_of(oracle)
    prompts = [prompt(5 + 3 * i, i) for i in range(8)]
    model.prefill([Piece(i, 0, p) for i, p in enumerate(prompts)])
    for step in range(3):
        tokens = [10 + step + s for s in slots]
        positions = torch.tensor([len(prompts[s]) for s in slots])
        logits = model.decode(torch.tensor(tokens), torch.tensor(slots), positions)
        for s, token, row in zip(slots, tokens, logits, strict=True):
            prompts[s].append(token)
            assert close(row, oracle.logits(prompts[s])[-1])


def test_a_decode_batch_out_of_order_is_refused() -> None:
    check_order(torch.tensor([0, 3, 4]))
    with pytest.raises(AssertionError, match="strictly increase"):
        check_order(torch.tensor([3, 0, 4]))


def test_copied_rows_serve_as_if_they_had_been_computed(oracle: Oracle) -> None:
    model = model_of(oracle)
    a = prompt(20)
    model.prefill([Piece(0, 0, a)])
    model.copy_rows(0, 6, 12)
    assert close(model.prefill([Piece(6, 12, [5, 6])])[0], oracle.logits([*a[:12], 5, 6])[-1])


def test_positions_past_the_context_are_refused_not_clamped(oracle: Oracle) -> None:
    model = model_of(oracle, context=16)
    with pytest.raises(AssertionError, match="too long"):
        model.prefill([Piece(0, 0, prompt(17))])


def test_bfloat16_is_near_float32(oracle: Oracle) -> None:
    model = Model(weights_of(oracle, torch.bfloat16), slots=2, context=64)
    a = prompt(20)
    p, q = torch.softmax(model.prefill([Piece(0, 0, a)])[0], -1), torch.softmax(oracle.logits(a)[-1], -1)
    assert float((p - q).abs().sum()) < 0.5


def test_captured_experts_are_the_routers_choices(tmp_path: Path) -> None:
    oracle = moe(tmp_path)
    model = model_of(oracle, capture=True)
    a = prompt(15)
    model.prefill([Piece(3, 0, a)])
    model.decode(torch.tensor([8]), torch.tensor([3]), torch.tensor([15]))
    assert model.experts is not None
    assert torch.equal(model.experts[3, :16].long(), oracle.experts([*a, 8]))


def test_weights_are_copied_on_load_and_never_alias(oracle: Oracle) -> None:
    weights = weights_of(oracle)
    source = {k: v.clone() for k, v in weights.named.items()}
    copy = weights.clone()
    for name, tensor in source.items():
        copy.write(name, tensor)
        tensor.zero_()
    assert checksum_of(copy.named.items()) == checksum_of(weights.named.items())
    copy.write("model.norm.weight", torch.zeros(32))
    assert bool(weights.named["model.norm.weight"].any())


def test_checksums_cover_dtype_shape_and_values() -> None:
    a = torch.arange(6, dtype=torch.float32)
    table = a.view(2, 3)
    held = {"a": a, "b": table, "c": a.to(torch.bfloat16), "d": a + 1, "e": a.clone(), "t": table.t()}
    sums = checksum_of(held.items())
    assert sums["a"] == sums["e"]
    assert len(set(sums.values())) == 5
    assert checksum_of([("t", table.t().contiguous())]) == {"t": sums["t"]}, "values count, not strides"
    assert combined(sums) == combined(dict(reversed(list(sums.items()))))
    assert combined(sums) != combined({**sums, "a": sums["d"]})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "llama"}, "qwen3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_a_config_that_the_forward_does_not_know_is_refused(oracle: Oracle, tmp_path: Path, change: dict[str, object], why: str) -> None:
    config = json.loads((oracle.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=why):
        read_shape(tmp_path)


def test_a_folder_with_missing_extra_or_misshapen_tensors_is_refused(tmp_path: Path) -> None:
    oracle = dense(tmp_path / "good")
    shape, good = read_shape(oracle.folder), load_file(oracle.folder / "model.safetensors")
    for change, why in (
        ({"model.norm.weight": None}, "missing"),
        ({"model.extra": torch.zeros(1)}, "belongs to no part"),
        ({"model.norm.weight": torch.zeros(31)}, "has shape"),
    ):
        bad = tmp_path / why.replace(" ", "-")
        shutil.copytree(oracle.folder, bad)
        save_file({k: v for k, v in {**good, **change}.items() if v is not None}, bad / "model.safetensors")
        with pytest.raises(ModelError, match=why):
            load_weights(bad, shape, torch.float32)
    (bad / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="can't be read"):
        load_weights(bad, shape, torch.float32)
    with pytest.raises(ModelError, match="can't be read"):
        read_shape(tmp_path / "nowhere")
