"""The contract against SGLang's recorded replies, and the tiny engine against both.

tests/fixtures/sglang/VERSION.json: exchanges recorded from SGLang 0.5.17 (H200) and 0.5.23 (CPU), long arrays cut short.
"""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl360.engines import contract as c
from tests.engines.tiny_models import VOCAB, Oracle, moe
from tests.engines.tiny_server import tiny_server

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang"
RECORDED: dict[str, dict[str, Any]] = {
    f"{path.stem}/{name}": exchange for path in sorted(FIXTURES.glob("*.json")) for name, exchange in json.loads(path.read_text()).items()
}

REPLIES: dict[str, Any] = {
    "/generate": c.GenerateReply,
    "/model_info": c.ModelInfo,
    "/server_info": c.ServerInfo,
    "/get_load": list[c.Load],
    "/pause_generation": c.PauseReply,
    "/continue_generation": c.PauseReply,
    "/begin_weight_update": c.Done,
    "/end_weight_update": c.Done,
    "/init_weights_update_group": c.Done,
    "/destroy_weights_update_group": c.Done,
    "/update_weights_from_distributed": c.Done,
    "/update_weight_version": c.Done,
    "/weights_checker": c.ChecksumReply,
}
REQUESTS: dict[str, Any] = {
    "/generate": c.GenerateRequest,
    "/pause_generation": c.PauseRequest,
    "/abort_request": c.AbortRequest,
    "/init_weights_update_group": c.InitWeightsGroup,
    "/destroy_weights_update_group": c.DestroyWeightsGroup,
    "/update_weights_from_distributed": c.UpdateFromDistributed,
    "/update_weight_version": c.UpdateWeightVersion,
    "/weights_checker": c.ChecksumRequest,
}
TINY_ONLY = {"meta_info.kv_versions", "meta_info.generation"}
"""Keys that SGLang doesn't have."""
NOT_REPLAYED = {
    "gloo_init_weights_update_group",  # needs a second rank: test_tiny_updates
    "gloo_update_from_distributed_bucket",
    "gloo_destroy_group",
    "begin_weight_update",
    "end_weight_update",
    "abort_request_victim",
    "generate_routed_experts_without_flag",
    "generate_stream",
    "update_weight_version",  # "label-only" is refused here: versions are str(int)
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return moe(tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("name", [n for n, e in RECORDED.items() if "reply" in e and e["path"] in REPLIES])
def test_recorded_replies_decode_with_the_contracts_types(name: str) -> None:
    exchange = RECORDED[name]
    refused = exchange["path"] == "/generate" and exchange["status"] == 400
    kind = c.ErrorReply if refused else REPLIES[exchange["path"]]
    decoded = msgspec.json.decode(json.dumps(exchange["reply"]), type=kind)
    if isinstance(decoded, c.GenerateReply):
        meta = exchange["reply"]["meta_info"]
        assert decoded.output_ids == exchange["reply"]["output_ids"]
        assert decoded.meta_info.cached_tokens == meta["cached_tokens"]
        assert [list(row) for row in decoded.meta_info.output_token_logprobs] == meta.get("output_token_logprobs", [])


@pytest.mark.parametrize("name", [n for n, e in RECORDED.items() if e["path"] in REQUESTS])
def test_recorded_requests_decode_with_the_contracts_types(name: str) -> None:
    msgspec.json.decode(json.dumps(RECORDED[name]["request"]), type=REQUESTS[RECORDED[name]["path"]])


def test_recorded_spans_and_expert_rows_mean_what_the_contract_says() -> None:
    for version in ("0.5.17", "0.5.23"):
        for name, start in (("routed_full_cold", 0), ("routed_start_len_mid", 7)):
            reply = msgspec.convert(RECORDED[f"{version}/{name}"]["reply"], c.GenerateReply)
            meta = reply.meta_info
            layers = topk = 4
            assert meta.routed_experts is not None
            rows = meta.prompt_tokens + meta.completion_tokens - 1 - start
            assert len(base64.b64decode(meta.routed_experts)) == 4 * rows * layers * topk
    spans = msgspec.convert(RECORDED["0.5.23/generate_logprob_warm"]["reply"], c.GenerateReply).meta_info.weight_versions
    assert spans == [c.WeightSpan(version="v0", start=0, end=8)]


@pytest.mark.parametrize("name", [n for n in RECORDED if n.split("/")[1] not in NOT_REPLAYED])
async def test_the_tiny_engine_answers_a_recorded_request_in_the_same_shape(oracle: Oracle, name: str) -> None:
    exchange = RECORDED[name]
    async with tiny_server(oracle, routed_experts=True) as client:
        request = _small(exchange["request"])
        status, reply = await (client.get(exchange["path"]) if exchange["method"] == "GET" else client.post(exchange["path"], request))
        assert status == exchange["status"]
        if "reply" not in exchange:
            assert not reply
            return
        refused = exchange["path"] == "/generate" and status == 400
        if exchange["path"] in REPLIES:
            msgspec.convert(reply, c.ErrorReply if refused else REPLIES[exchange["path"]])
        ours, theirs = _keys(reply), _keys(exchange["reply"])
        assert ours - TINY_ONLY <= _known_keys(exchange["path"]), "no key that SGLang doesn't have"
        if exchange["path"] == "/generate" and not refused:
            assert reply["meta_info"]["completion_tokens"] <= request["sampling_params"]["max_new_tokens"]
            assert {"text", "output_ids", "meta_info.id", "meta_info.finish_reason.type", "meta_info.num_retractions"} <= ours
            assert ("meta_info.output_token_logprobs" in ours) == ("meta_info.output_token_logprobs" in theirs)
            assert ("meta_info.routed_experts" in ours) == ("meta_info.routed_experts" in theirs)
            assert ("prompt_token_ids" in ours) == ("prompt_token_ids" in theirs)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
async def test_streams_have_the_same_events(oracle: Oracle, version: str) -> None:
    exchange = RECORDED[f"{version}/generate_stream"]
    async with (
        tiny_server(oracle) as client,
        client.session.post(client.url + "/generate", json=_small(exchange["request"])) as response,
    ):
        assert response.headers["content-type"] == exchange["content_type"]
        ours, theirs = _events(await response.text()), _events(exchange["text"])
    assert ours[-1] == theirs[-1] == "[DONE]"
    for events in (ours, theirs):
        chunks = [msgspec.json.decode(e, type=c.GenerateChunk) for e in events[:-1]]
        assert [len(chunk.output_ids) for chunk in chunks] == [1, 2, 3, 4]
        assert [len(chunk.meta_info.output_token_logprobs) for chunk in chunks] == [1, 2, 3, 4]
        assert [chunk.meta_info.finish_reason is None for chunk in chunks] == [True, True, True, False]


async def test_an_aborted_request_is_answered_as_sglang_answers_it(oracle: Oracle) -> None:
    recorded = RECORDED["0.5.23/abort_request_victim"]
    async with tiny_server(oracle) as client:
        victim = await client.frozen("abort-me", _small({**recorded["request"], "sampling_params": {"max_new_tokens": 20}}), 3)
        await client.post("/abort_request", {"rid": "abort-me"})
        status, reply = await victim
    assert (status, reply["meta_info"]["finish_reason"]["type"]) == (recorded["status"], "abort")
    assert _keys(reply) - TINY_ONLY <= _known_keys("/generate")


async def test_a_gateways_probes_are_answered(oracle: Oracle) -> None:
    """What a gateway asks of a worker before it sends traffic."""
    async with tiny_server(oracle) as client:
        paths = ("/health", "/v1/models", "/server_info", "/model_info", "/get_model_info")
        replies = await asyncio.gather(*(client.get(p) for p in paths))
    assert [status for status, _ in replies] == [200] * 5


def _events(text: str) -> list[str]:
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def _small(request: Any) -> Any:
    """The recorded request with its ids brought into the small vocabulary."""
    if not isinstance(request, dict) or "input_ids" not in request:
        return request
    params = {**request["sampling_params"], "ignore_eos": True}
    if "stop_token_ids" in params:
        params["stop_token_ids"] = [i % VOCAB for i in params["stop_token_ids"]]
    return {**request, "input_ids": [3 + i % (VOCAB - 3) for i in request["input_ids"]], "sampling_params": params}


def _keys(value: Any, prefix: str = "") -> set[str]:
    """Dotted names of all keys; values under free keys (checksums by weight) are left out."""
    if isinstance(value, list):
        return set().union(*(_keys(v, prefix) for v in value)) if value else set()
    if not isinstance(value, dict) or prefix.endswith("checksums."):
        return set()
    return set().union(*({f"{prefix}{k}"} | _keys(v, f"{prefix}{k}.") for k, v in value.items()))


def _known_keys(path: str) -> set[str]:
    """All keys of all recorded replies of a path: which of them a reply has depends on SGLang's version and flags."""
    return set().union(*(_keys(e["reply"]) for e in RECORDED.values() if e["path"] == path and "reply" in e))
