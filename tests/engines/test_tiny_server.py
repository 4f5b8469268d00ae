"""The tiny engine over HTTP: replies, refusals, streams, pauses, and that nothing a client sends ends it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from rl360.engines.tiny.engine import Engine, EngineOptions
from rl360.engines.tiny.shape import ModelError
from tests.engines.tiny_models import EOS, VOCAB, Oracle, dense, moe, prompt
from tests.engines.tiny_server import DEADLINE, generate_body, tiny_server


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return dense(tmp_path_factory.mktemp("dense"))


def logprobs(body: Any) -> list[float]:
    return [row[0] for row in body["meta_info"]["output_token_logprobs"]]


# ------------------------------------------------------------------------------------------------ replies


async def test_many_requests_at_once_each_get_their_own_tokens(oracle: Oracle) -> None:
    async with tiny_server(oracle, slots=5) as client:
        prompts = [prompt(4 + 3 * i, i) for i in range(16)]
        bodies = await asyncio.gather(*(client.generate(p, 6, return_prompt_token_ids=True) for p in prompts))
    for ids, body in zip(prompts, bodies, strict=True):
        assert body["prompt_token_ids"] == ids
        truth = oracle.logprobs(ids, body["output_ids"])
        assert float((truth - torch.tensor(logprobs(body))).abs().max()) < 1e-5
        meta = body["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (len(ids), 6, "0")
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
        assert meta["generation"] == "engine0-test"


async def test_it_stops_at_the_models_end_token_unless_told_not_to(oracle: Oracle) -> None:
    async with tiny_server(oracle) as client:
        longs = await asyncio.gather(*(client.generate(prompt(5, i), 100, sampling={"ignore_eos": False}) for i in range(12)))
    assert any(b["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS} for b in longs)
    assert all(EOS not in b["output_ids"][:-1] for b in longs)


async def test_a_session_hits_the_cache_over_http(oracle: Oracle) -> None:
    async with tiny_server(oracle) as client:
        first = await client.generate(prompt(20), 5)
        second = await client.generate(prompt(20) + first["output_ids"] + [7, 8], 5)
        assert second["meta_info"]["cached_tokens"] == 24
        assert await client.metric("cached_tokens_total") == 24
        assert await client.metric("prompt_tokens_total") == 20 + 27
        assert (await client.post("/flush_cache"))[0] == 200
        third = await client.generate(prompt(20), 1)
        assert third["meta_info"]["cached_tokens"] == 0


async def test_streamed_ids_are_cumulative(oracle: Oracle) -> None:
    async with tiny_server(oracle) as client:
        body = generate_body(prompt(6), 4, stream=True, rid="s.")
        async with client.session.post(client.url + "/generate", json=body) as reply:
            assert reply.content_type == "text/event-stream"
            events = [line.removeprefix("data: ") for line in (await reply.text()).split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(e) for e in events[:-1]]
        lengths = [len(c["output_ids"]) for c in chunks]
        assert lengths == [1, 2, 3, 4]
        assert [len(logprobs(c)) for c in chunks] == lengths
        assert [c["meta_info"]["finish_reason"] is None for c in chunks] == [True, True, True, False]
        status, refused = await client.post("/generate", {**body, "input_ids": []})
        assert (status, refused) == (400, {"error": {"message": "input_ids cannot be empty."}})


async def test_text_is_the_tokenizers_and_a_stop_token_is_trimmed_from_it_alone(tmp_path: Any) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    oracle = dense(tmp_path)
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    async with tiny_server(oracle) as client:
        free = await client.generate(prompt(6), 5, sampling={"temperature": 0})
        words = [f"w{i}" for i in free["output_ids"]]
        assert free["text"].split() == words
        stop = {"temperature": 0, "stop_token_ids": [free["output_ids"][2]]}
        cut = await client.generate(prompt(6), 5, sampling=stop)
        kept = await client.generate(prompt(6), 5, sampling={**stop, "no_stop_trim": True})
    assert cut["output_ids"] == kept["output_ids"]
    assert (cut["text"].split(), kept["text"].split()) == (words[: len(cut["output_ids"]) - 1], words[: len(cut["output_ids"])])


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"input_ids": []}, "cannot be empty"),
        ({"input_ids": [5, VOCAB]}, "input_ids[1] = 96 is not in the vocabulary"),
        ({"input_ids": [5, 999999]}, "not in the vocabulary"),
        ({"input_ids": [-1]}, "not in the vocabulary"),
        ({"input_ids": [2**70]}, "not in the vocabulary"),
        ({"input_ids": [3] * 125}, "longer than the model's context length (128 tokens)"),
        ({"input_ids": "text"}, "not a generate request"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 1, "temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": 1, "top_p": 0.5}}, "whole vocabulary"),
        ({"sampling_params": {"max_new_tokens": 1, "top_k": 5}}, "whole vocabulary"),
        ({"return_routed_experts": True, "routed_experts_start_len": 4}, "routed_experts_start_len=4"),
        ({"return_routed_experts": True, "routed_experts_start_len": -1}, "routed_experts_start_len=-1"),
    ],
)
async def test_what_cannot_be_served_is_refused_and_the_engine_lives(oracle: Oracle, change: dict[str, Any], why: str) -> None:
    async with tiny_server(oracle, context=128) as client:
        status, body = await client.post("/generate", {**generate_body(prompt(3), 8), **change})
        assert status == 400
        assert why in body["error"]["message"]
        assert len((await client.generate(prompt(120), 8))["output_ids"]) == 8, "exactly the context fits"


async def test_bodies_that_are_not_json_are_refused_everywhere(oracle: Oracle) -> None:
    async with tiny_server(oracle) as client:
        for path in ("/generate", "/pause_generation", "/abort_request", "/update_weights_from_distributed", "/weights_checker"):
            async with client.session.post(client.url + path, data=b"\xff{") as reply:
                assert reply.status == 400, path
                assert (await reply.json()) != {}
        assert (await client.post("/pause_generation", {"mode": "no_such"}))[0] == 400
        assert (await client.post("/abort_request", {}))[0] == 400
        assert (await client.post("/update_weight_version", {"new_version": "v1"}))[0] == 400
        assert (await client.post("/update_weight_version", {"new_version": "1", "abort_all_requests": True}))[0] == 400
        assert (await client.get("/health"))[0] == 200


async def test_unknown_fields_are_ignored_and_a_live_rid_is_refused(oracle: Oracle) -> None:
    async with tiny_server(oracle) as client:
        await client.generate(prompt(3), 2, no_such_field=1)
        await client.post("/pause_generation", {"mode": "in_place"})
        first = asyncio.create_task(client.generate(prompt(3), 2, rid="dup"))
        await client.until(lambda: "dup" in client.engine.scheduler.waiting)
        status, body = await client.post("/generate", generate_body(prompt(3), 2, rid="dup"))
        assert (status, body) == (400, {"error": {"message": "Duplicate request ID detected: dup"}})
        await client.post("/continue_generation")
        assert (await first)["meta_info"]["id"] == "dup"


def test_models_that_cannot_be_served_as_asked_are_refused_at_the_start(oracle: Oracle) -> None:
    async def start(**options: Any) -> None:
        Engine(EngineOptions(model=oracle.folder, generation="g", **options))

    with pytest.raises(ModelError, match="context of 4096"):
        asyncio.run(start(context=4096))
    with pytest.raises(ModelError, match="routed experts"):
        asyncio.run(start(routed_experts=True))


# ------------------------------------------------------------------------------------------------ pause, abort


async def test_cases_34_it_stays_healthy_while_paused_and_resumes_by_itself(oracle: Oracle) -> None:
    async with tiny_server(oracle, timeout=0.05) as client:
        await client.post("/pause_generation", {"mode": "in_place"})
        assert (await client.get("/health"))[0] == (await client.get("/health_generate"))[0] == 200
        assert len((await client.generate(prompt(3), 2))["output_ids"]) == 2, "nobody continued it: the watchdog did"
        assert await client.metric("forced_resumes_total") == 1


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_holds_requests_until_continue(oracle: Oracle, mode: str) -> None:
    async with tiny_server(oracle) as client:
        running = await client.frozen("long", generate_body(prompt(5), 20), 3)
        paused = await client.post("/pause_generation", {"mode": mode})
        assert paused == (200, {"message": "Generation paused successfully.", "status": "ok"})
        held = asyncio.create_task(client.generate(prompt(4, 1), 2))
        await client.until(lambda: len(client.engine.scheduler.waiting) == (1 if mode == "in_place" else 2))
        assert await client.metric("paused") == 1
        assert (await client.post("/flush_cache"))[0] == (400 if mode == "in_place" else 200)
        assert not running.done()
        assert not held.done()
        await client.post("/continue_generation")
        _, body = await running
        assert body["meta_info"]["num_retractions"] == (0 if mode == "in_place" else 1)
        assert float((oracle.logprobs(prompt(5), body["output_ids"]) - torch.tensor(logprobs(body))).abs().max()) < 1e-5
        assert len((await held)["output_ids"]) == 2


async def test_pausing_by_abort_answers_at_once(oracle: Oracle) -> None:
    async with tiny_server(oracle) as client:
        running = await client.frozen("long", generate_body(prompt(5), 20), 3)
        await client.post("/pause_generation", {"mode": "abort"})
        _, body = await running
        assert body["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted"}
        assert len(body["output_ids"]) == len(logprobs(body)) == 3


async def test_an_abort_by_rid_prefix_works_while_paused(oracle: Oracle) -> None:
    async with tiny_server(oracle) as client:
        await client.post("/pause_generation", {"mode": "in_place"})
        jobs = {rid: asyncio.create_task(client.generate(prompt(5), 3, rid=rid)) for rid in ("a.1.", "a.2.", "b.1.")}
        await client.until(lambda: len(client.engine.scheduler.waiting) == 3)
        assert (await client.post("/abort_request", {"rid": "a."}))[0] == 200
        for rid in ("a.1.", "a.2."):
            assert (await jobs[rid])["meta_info"]["finish_reason"]["type"] == "abort"
        assert not jobs["b.1."].done()
        await client.post("/abort_request", {"abort_all": True})
        assert (await jobs["b.1."])["output_ids"] == []


async def test_a_client_that_hangs_up_frees_its_slot_and_no_other(oracle: Oracle) -> None:
    async with tiny_server(oracle) as client:
        other = await client.frozen("s.12", generate_body(prompt(6), 20), 2)
        gone = await client.frozen("s.1", generate_body(prompt(5), 20), 1)
        gone.cancel()
        await client.until(lambda: "s.1" not in client.engine.scheduler.running)
        await client.post("/continue_generation")
        _, body = await other
        assert len(body["output_ids"]) == 20


async def test_an_engine_whose_thread_dies_says_so_and_does_not_hang(oracle: Oracle) -> None:
    async with tiny_server(oracle) as client:
        await client.post("/pause_generation", {"mode": "in_place"})
        waiting = asyncio.create_task(client.post("/generate", generate_body(prompt(3), 2)))
        await client.until(lambda: bool(client.engine.scheduler.waiting))
        with pytest.raises(ZeroDivisionError):
            await client.engine.call(lambda: 1 // 0)
        status, body = await waiting
        assert (status, "engine is gone" in body["error"]["message"]) == (500, True)
        assert (await client.get("/health"))[0] == 503
        assert (await client.post("/generate", generate_body(prompt(3), 2)))[0] == 500
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(client.engine.crashed, DEADLINE)


# ------------------------------------------------------------------------------------------------ experts, entry point


async def test_routed_experts_need_the_servers_flag(tmp_path: Any) -> None:
    oracle = moe(tmp_path)
    async with tiny_server(oracle) as client:
        assert "routed_experts" not in (await client.generate(prompt(4), 2, return_routed_experts=True))["meta_info"]
    async with tiny_server(oracle, routed_experts=True) as client:
        assert (await client.generate(prompt(4), 2, return_routed_experts=True))["meta_info"]["routed_experts"]
        assert "routed_experts" not in (await client.generate(prompt(4), 2))["meta_info"]


def test_the_module_serves_by_itself_and_ends_on_sigterm(oracle: Oracle) -> None:
    command = [sys.executable, "-m", "rl360.engines.tiny", "--model", str(oracle.folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    try:
        assert process.stdout is not None
        assert re.fullmatch(r"tiny engine listening on http://127\.0\.0\.1:\d+\n", process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
    bad = subprocess.run([*command[:4], "/nowhere", *command[5:]], capture_output=True, text=True, timeout=DEADLINE)
    assert (bad.returncode, "Hugging Face layout" in bad.stderr) == (1, True)
