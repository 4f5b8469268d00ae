"""S9, S10 and CASES 23 to 25: expert rows from an engine's edge to the sample."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from rl360.bus.events import RoutingDelta, TurnCompleted
from rl360.config import Engine
from rl360.sessions import routing
from rl360.sessions.routing import RoutingError, RoutingShape
from tests.sessions.conftest import Rig
from tests.sessions.fake_engine import FakeEngine
from tests.sessions.test_server import answer_of

USER: dict[str, Any] = {"role": "user", "content": "list files"}
SHAPE = RoutingShape(layers=2, topk=2, experts=8)
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [0]}


def b64(ids: Any) -> str:
    return base64.b64encode(np.array(ids, "<i4").tobytes()).decode()


def unheld(start: int, end: int) -> routing.Rows:
    raise AssertionError((start, end))


@pytest.fixture
async def moe(make_rig: Any, engine: FakeEngine) -> Rig:
    engine.routing = (2, 2, 8)
    rig = await make_rig(engine=Engine(request_timeout=2.0, routed_experts=True), model=MOE)
    await rig.open()
    return rig


def test_s10_the_dtype_follows_the_number_of_experts() -> None:
    assert (SHAPE.dtype, RoutingShape(layers=1, topk=1, experts=256).dtype) == ("uint8", "uint8")
    big = RoutingShape(layers=1, topk=1, experts=512)
    rows = routing.decode(b64([[[300]], [[5]]]), big)
    assert (str(rows.dtype), rows.ravel().tolist()) == ("uint16", [300, 5])  # CASES 24


@pytest.mark.parametrize(
    ("data", "why"),
    [("!!", "base64"), (b64([1, 2, 3]), "not rows"), (b64([[[1, 8], [0, 1]]]), "expert 0..8"), (b64([[[1, -1], [0, 1]]]), "expert -1")],
)
def test_s10_rows_that_are_no_rows_are_refused(data: str, why: str) -> None:
    with pytest.raises(RoutingError, match=why):
        routing.decode(data, SHAPE)


def test_s10_an_expert_that_is_named_twice_is_refused_with_its_place() -> None:
    """megatron's dispatcher would crash on it, a step later and without a name."""
    with pytest.raises(RoutingError, match=r"twice, in row 1, MoE layer 0: \[3, 3\]"):
        routing.decode(b64([[[0, 1], [2, 3]], [[3, 3], [0, 1]]]), SHAPE)


def test_s9_a_gap_is_refused_and_an_overlap_is_compared() -> None:
    rows = routing.decode(b64([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[1, 2], [3, 4]]]), SHAPE)
    with pytest.raises(RoutingError, match="rows start at 7, the session holds 5"):
        routing.place(rows, tokens=11, held=5, stored=unheld)
    exact = routing.place(rows, tokens=11, held=7, stored=unheld)
    assert (exact.first, len(exact.rows), exact.overlap_rows) == (7, 3, 0)
    held = rows.copy()
    held[1, 0] = held[1, 0, ::-1]  # the same experts in another order
    held[0, 1] = [2, 4]
    over = routing.place(rows, tokens=11, held=9, stored=lambda a, b: held[a - 7 : b - 7])
    assert (over.first, len(over.rows), over.overlap_rows, over.overlap_mismatch) == (9, 1, 2, 1)
    with pytest.raises(RoutingError, match="3 expert rows for 2 tokens"):
        routing.place(rows, tokens=2, held=0, stored=unheld)


def test_s10_only_layers_with_experts_count() -> None:
    assert routing.shape_of(MOE) == SHAPE
    dense_first = {"n_routed_experts": 512, "num_experts_per_tok": 8, "num_hidden_layers": 61, "first_k_dense_replace": 3}
    assert routing.shape_of(dense_first) == RoutingShape(layers=58, topk=8, experts=512)
    with pytest.raises(RoutingError, match="no experts"):
        routing.shape_of({"num_hidden_layers": 3})


def test_s10_rows_of_every_layer_lose_the_dense_ones() -> None:
    """SGLang sends a row for each layer of the model; what stands at a dense one may be no expert at all."""
    config = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [0]}
    shape = routing.shape_of(config, every_layer=True)
    sent = np.array([[[-1, 99], [1, 2], [3, 4]], [[-1, 99], [5, 6], [7, 0]]], "<i4")
    rows = routing.decode(base64.b64encode(sent.tobytes()).decode(), shape)
    assert rows.tolist() == sent[:, 1:].tolist() and rows.dtype == np.uint8
    with pytest.raises(RoutingError, match="not rows of 3 layers x 2"):
        routing.decode(base64.b64encode(sent[:, 1:][:1].tobytes()).decode(), shape)


async def test_s9_each_turn_asks_for_and_stores_only_new_rows(moe: Rig) -> None:
    _, first = await moe.chat([USER])
    _, second = await moe.chat([USER, answer_of(first), USER])
    await moe.chat([USER, answer_of(first), USER, answer_of(second), USER])
    turns, deltas = await moe.events(TurnCompleted), await moe.events(RoutingDelta)
    requests = moe.engine.requests[1:]  # after the probe
    ends = [t.prompt_tokens + t.output_ids.size // 4 - 1 for t in turns]
    assert [d.first for d in deltas] == [0, *ends[:-1]]
    assert [d.first + d.rows for d in deltas] == ends
    assert [r.get("routed_experts_start_len", 0) for r in requests] == [0, *ends[:-1]]
    assert [(d.layers, d.topk, d.dtype) for d in deltas] == [(2, 2, "uint8")] * 3
    assert deltas[0].data.size == deltas[0].rows * 4


async def test_s9_a_rebuilt_session_asks_only_for_the_rows_it_does_not_hold(moe: Rig) -> None:
    _, first = await moe.chat([USER])
    held = (await moe.events(RoutingDelta))[-1].rows
    await moe.kill()
    await moe.start()
    await moe.chat([USER, answer_of(first), USER])
    assert moe.engine.requests[-1]["routed_experts_start_len"] == held
    assert [d.first for d in await moe.events(RoutingDelta)] == [0, held]


async def test_s9_an_engine_that_sends_everything_again_is_compared(moe: Rig) -> None:
    _, first = await moe.chat([USER])
    held = (await moe.events(RoutingDelta))[-1].rows

    def everything(body: dict[str, Any]) -> dict[str, Any]:
        reply = moe.engine.reply(body)
        rows = np.frombuffer(base64.b64decode(moe.engine.rows(body, reply["output_ids"], start=0)), "<i4").copy()
        rows[0] = (rows[0] + 3) % 8
        reply["meta_info"]["routed_experts"] = b64(rows)
        return reply

    moe.engine.script = [everything]
    await moe.chat([USER, answer_of(first), USER])
    delta = (await moe.events(RoutingDelta))[-1]
    assert (delta.first, delta.overlap_rows, delta.overlap_mismatch) == (held, held, 1)
    assert await moe.metric("routing_overlap_mismatch") == 1


async def test_s9_a_gap_rejects_the_turn(moe: Rig) -> None:
    _, first = await moe.chat([USER])

    def gap(body: dict[str, Any]) -> dict[str, Any]:
        reply = moe.engine.reply(body)
        reply["meta_info"]["routed_experts"] = moe.engine.rows(body, reply["output_ids"], start=body["routed_experts_start_len"] + 1)
        return reply

    moe.engine.script = [gap]
    code, body = await moe.chat([USER, answer_of(first), USER])
    assert (code, body["error"]["boundary"], body["error"]["cause"]) == (502, "engine", "refused")
    assert "rows are missing" in body["error"]["message"]
    assert len(await moe.events(TurnCompleted)) == 1


async def test_case25_a_turn_without_rows_stands_and_the_next_one_brings_them(moe: Rig) -> None:
    def bare(body: dict[str, Any]) -> dict[str, Any]:
        reply = moe.engine.reply(body)
        del reply["meta_info"]["routed_experts"]
        return reply

    moe.engine.script = [bare]
    _, first = await moe.chat([USER])
    assert await moe.metric("routing_missing") == 1
    await moe.chat([USER, answer_of(first), USER])
    turns, (delta,) = await moe.events(TurnCompleted), await moe.events(RoutingDelta)
    assert (delta.turn, delta.first, delta.rows) == (2, 0, turns[1].prompt_tokens + turns[1].output_ids.size // 4 - 1)


@pytest.mark.parametrize(("routed", "why"), [(None, "routed_experts is missing"), ((3, 2, 8), "expert rows|not rows")])
async def test_case23_an_engine_that_returns_no_rows_fails_before_the_run(make_rig: Any, engine: FakeEngine, routed: Any, why: str) -> None:
    engine.routing = routed
    with pytest.raises(RoutingError, match=why):
        await make_rig(engine=Engine(request_timeout=2.0, routed_experts=True), model=MOE)
    with pytest.raises(RoutingError, match="no experts"):
        await make_rig(engine=Engine(request_timeout=2.0, routed_experts=True))
