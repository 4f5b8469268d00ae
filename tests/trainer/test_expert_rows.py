"""S8, S11: a sample has an expert row for each token but its last; whatever can't be replayed is refused by name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.bus import sample as wire
from rl360.bus.sample import Routing, Sample
from rl360.sessions.routing import RoutingShape, pack_rows
from rl360.trainer import expert_rows
from rl360.trainer.batch import Microbatch, Replay, pack, train_sample
from rl360.trainer.expert_rows import ReplayError

SHAPE = RoutingShape(layers=2, topk=2, experts=5)


def sample_of(mask: list[int]) -> Sample:
    m = np.array(mask, np.uint8)
    n = len(m)
    logprobs, versions = np.where(m, -1, 0).astype(np.float32), np.where(m, 0, -1).astype(np.int32)
    return wire.make(attempt="t3-g001-a2", branch=1, ids=np.arange(n, dtype=np.int32), mask=m, logprobs=logprobs, versions=versions)


TWO_TURNS = sample_of([0, 0, 1, 1, 0, 0, 1, 1])


def routing_of(sample: Sample, shape: RoutingShape = SHAPE, seed: int = 0) -> Routing:
    rng = np.random.default_rng(seed)
    rows = [[rng.permutation(shape.experts)[: shape.topk] for _ in range(shape.layers)] for _ in range(len(sample) - 1)]
    return pack_rows(np.array(rows, shape.dtype))


def changed(row: int, layer: int, experts: tuple[int, ...]) -> Routing:
    routing = routing_of(TWO_TURNS)
    rows = routing.array.copy()
    rows[row, layer] = experts
    return pack_rows(rows)


GOOD = routing_of(TWO_TURNS)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (None, r"t3-g001-a2/1: has no recorded experts"),
        (changed(1, 0, (3, 3)), r"t3-g001-a2/1, turn 1 of the branch, row 1, MoE layer 0: .* twice"),
        (changed(5, 1, (4, 5)), r"t3-g001-a2/1, turn 2 of the branch, row 5, MoE layer 1: .* lacks: it has 5"),
        (pack_rows(GOOD.array[:4]), r"t3-g001-a2/1, turn 2 of the branch, row 4: .* 4 rows where 7 are due"),
        (msgspec.structs.replace(GOOD, rows=8, data=GOOD.data + GOOD.data[:4]), r"8 rows .* 7 rows"),
        (msgspec.structs.replace(GOOD, data=GOOD.data[:-1]), r"27 bytes; 7 rows in 28 bytes"),
        (pack_rows(GOOD.array[:, :1]), r"recorded 1 layers x 2 .* 2 MoE layers x 2"),
        (pack_rows(GOOD.array[..., :1]), r"recorded 2 layers x 1"),
        (pack_rows(GOOD.array.astype("<u2")), r"uint16, the policy has .* uint8"),
    ],
)
def test_s11_rows_that_cant_be_replayed_are_refused_by_place(routing, message):
    with pytest.raises(ReplayError, match=message):
        expert_rows.expert_rows(TWO_TURNS, routing, SHAPE)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=5), wide=st.booleans())
def test_s8_packed_rows_stand_at_their_own_tokens(lengths, wide):
    shape = RoutingShape(layers=3, topk=2, experts=300 if wide else 5)
    samples = [sample_of([0] * (n - 1) + [1]) for n in lengths]
    routings = [routing_of(s, shape, seed=i) for i, s in enumerate(samples)]
    trained = [train_sample(wire.encode(s), advantage=1.0, routing=wire.encode(r)) for s, r in zip(samples, routings, strict=True)]
    experts = pack(Microbatch(tuple(trained)), Replay(shape)).experts
    assert experts is not None
    assert experts.shape == (sum(lengths), 3, 2)
    start = 0
    for n, routing in zip(lengths, routings, strict=True):
        assert np.array_equal(experts[start : start + n - 1].numpy(), routing.array)
        assert experts[start + n - 1].tolist() == [[0, 1]] * 3, "the last token has no row: any experts do"
        start += n


def test_an_empty_microbatch_has_rows_that_can_be_replayed():
    experts = pack(Microbatch(()), Replay(SHAPE)).experts
    assert experts is not None
    assert experts.tolist() == [[[0, 1], [0, 1]]] * 2


def test_samples_are_packed_without_rows_when_nothing_is_replayed():
    sample = train_sample(wire.encode(TWO_TURNS), advantage=1.0)
    assert pack(Microbatch((sample,))).experts is None
