"""Continuous batching, driven step by step: log-probs, reuse, pause, abort, updates between tokens, expert rows."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch

from rl360.engines.contract import WeightSpan
from rl360.engines.tiny.model import Piece
from rl360.engines.tiny.requests import Request
from tests.engines.tiny_models import Bench, Oracle, dense, model_of, moe, prompt, weights_of

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The same shape with other weights."""
    return dense(tmp_path_factory.mktemp("other"), seed=9)


@pytest.fixture(scope="module")
def expert_oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return moe(tmp_path_factory.mktemp("moe"))


def agrees(request: Request, oracle: Oracle, temperature: float = 1.0) -> bool:
    """The request's log-probs are what transformers gives its tokens."""
    truth = oracle.logprobs(request.ids[: request.prompt], request.output, temperature)
    return float((truth - torch.tensor(request.logprobs)).abs().max()) < TOLERANCE


# ------------------------------------------------------------------------------------------------ tokens and log-probs


def test_log_probs_of_a_mixed_batch_equal_transformers(oracle: Oracle) -> None:
    bench = Bench(oracle, slots=6)
    requests = [bench.add(prompt(5 + 7 * i, i), max_new=4 + i, temperature=(1.0, 0.7)[i % 2]) for i in range(9)]  # more than slots
    bench.run()
    for i, request in enumerate(requests):
        assert len(request.output) == len(request.logprobs) == 4 + i
        assert agrees(request, oracle, request.temperature)
        assert request.finish is not None
        assert (request.finish.type, request.finish.length) == ("length", 4 + i)


def test_requests_that_join_and_leave_while_others_decode_stay_apart(oracle: Oracle) -> None:
    bench = Bench(oracle, slots=5)
    requests = [bench.add(prompt(12, 0), max_new=25)]
    for i in range(1, 12):
        bench.run(2)
        requests.append(bench.add(prompt(6 + i, i), max_new=3 + i % 5))
    bench.run()
    assert len(bench.done) == 12
    assert all(agrees(r, oracle) for r in requests)


def test_a_stop_token_ends_and_is_kept(oracle: Oracle) -> None:
    bench = Bench(oracle)
    free = bench.reply(prompt(10), 20, temperature=0.0)
    stop = free.output[3]
    cut = bench.reply(prompt(10), 20, temperature=0.0, stop=(stop,))
    assert cut.output == free.output[: free.output.index(stop) + 1]
    assert cut.finish is not None
    assert (cut.finish.type, cut.finish.matched) == ("stop", stop)
    assert len(cut.logprobs) == len(cut.output)


# ------------------------------------------------------------------------------------------------ reuse


def test_a_second_turn_on_cached_rows_equals_a_cold_prefill(oracle: Oracle) -> None:
    bench = Bench(oracle)
    first = bench.reply(prompt(20), 6)
    second = bench.reply(first.ids + prompt(7, 1), 6)
    assert first.cached == 0
    assert second.cached == 20 + 6 - 1, "all but the last sampled token, whose row was never computed"
    assert agrees(second, oracle)
    cold = model_of(oracle).prefill([Piece(0, 0, second.ids[: second.prompt])])[0]
    warm = bench.scheduler.model.prefill([Piece(second.slot, second.prompt - 1, second.ids[second.prompt - 1 : second.prompt])])[0]
    assert float((cold - warm).abs().max()) < TOLERANCE


def test_cached_tokens_are_exact(oracle: Oracle) -> None:
    bench = Bench(oracle)
    base = prompt(30)
    assert bench.reply(base, 4).cached == 0
    assert bench.reply(base, 4).cached == 29, "a repeat: all but the last prompt token"
    assert bench.reply(base[:10] + prompt(5, 7), 4).cached == 10, "a shared beginning is copied"
    assert bench.scheduler.counters.cached_tokens == 39
    assert bench.scheduler.counters.prompt_tokens == 30 + 30 + 15


def test_sessions_keep_their_own_rows_between_turns(oracle: Oracle) -> None:
    bench = Bench(oracle, slots=4)
    sessions = [bench.add(prompt(15, i), max_new=5) for i in range(4)]
    bench.run()
    for turn in range(2):
        following = [bench.add(s.ids + prompt(4, 50 + turn), max_new=5) for s in reversed(sessions)]
        bench.run()
        assert all(f.cached == len(s.ids) - 1 for f, s in zip(following, reversed(sessions), strict=True))
        assert all(agrees(f, oracle) for f in following)
        sessions = list(reversed(following))


def test_attempts_of_a_group_that_start_together_share_their_prompt(oracle: Oracle) -> None:
    bench = Bench(oracle)
    task = prompt(40)
    group = [bench.add(task, max_new=5) for _ in range(6)]
    bench.run()
    assert [r.cached for r in group] == [0, 39, 39, 39, 39, 39]
    assert all(agrees(r, oracle) for r in group)
    assert len({tuple(r.output) for r in group}) > 1


# ------------------------------------------------------------------------------------------------ pause and abort


def test_pause_in_place_freezes_and_resumes_on_the_same_rows(oracle: Oracle) -> None:
    bench = Bench(oracle)
    request = bench.add(prompt(10), max_new=12)
    bench.run(4)
    bench.scheduler.pause("in_place")
    held = bench.add(prompt(5, 1), max_new=2)
    tokens, prefilled = list(request.ids), bench.scheduler.counters.prefill_tokens
    bench.run()
    assert (request.ids, held.logprobs) == (tokens, []), "nothing moves, new requests are held"
    bench.scheduler.resume()
    bench.run()
    assert agrees(request, oracle)
    assert agrees(held, oracle)
    assert request.retractions == 0
    assert bench.scheduler.counters.prefill_tokens == prefilled + 5, "only the new request was prefilled"
    assert bench.scheduler.counters.paused_seconds > 0


def test_pause_by_retraction_recomputes_and_keeps_tokens(oracle: Oracle) -> None:
    bench = Bench(oracle)
    request = bench.add(prompt(10), max_new=12)
    bench.run(4)
    bench.scheduler.pause("retract")
    sampled = list(request.output)
    assert not bench.scheduler.running
    assert bench.scheduler.flush()
    prefilled = bench.scheduler.counters.prefill_tokens
    bench.scheduler.resume()
    bench.run()
    assert request.output[: len(sampled)] == sampled
    assert len(request.output) == 12
    assert agrees(request, oracle)
    assert (request.retractions, request.cached) == (1, 0)
    assert bench.scheduler.counters.prefill_tokens == prefilled + 10 + len(sampled)


def test_pause_by_abort_answers_with_partial_tokens(oracle: Oracle) -> None:
    bench = Bench(oracle, slots=1)
    running, waiting = bench.add(prompt(10), max_new=12), bench.add(prompt(5, 1), max_new=2)
    bench.run(4)
    bench.scheduler.pause("abort")
    assert [r.finish.type for r in (running, waiting) if r.finish] == ["abort", "abort"]
    assert (len(running.output), waiting.output) == (4, [])
    assert agrees(running, oracle)
    held = bench.add(prompt(6, 2), max_new=2)
    bench.run()
    assert held.finish is None
    bench.scheduler.resume()
    bench.run()
    assert agrees(held, oracle)


def test_abort_matches_a_prefix_and_leaves_the_others(oracle: Oracle) -> None:
    bench = Bench(oracle, slots=2)
    rids = ["s1:t1.", "s1:t2.", "s1:t20.", "s2:t1."]
    requests = [bench.add(prompt(8, i), max_new=9, rid=rid) for i, rid in enumerate(rids)]
    bench.run(3)
    bench.scheduler.pause("in_place")
    bench.scheduler.abort("s1:t2")
    assert [bool(r.finish) for r in requests] == [False, True, True, False]
    bench.scheduler.resume()
    bench.run()
    assert all(agrees(r, oracle) for r in (requests[0], requests[3]))
    assert bench.scheduler.counters.aborted == 2


def test_a_live_rid_is_taken_once(oracle: Oracle) -> None:
    bench = Bench(oracle)
    request = bench.add(prompt(5), rid="one")
    assert not bench.scheduler.submit(request)
    bench.run()
    bench.add(prompt(5), rid="one")


# ------------------------------------------------------------------------------------------------ updates


def test_an_update_between_tokens_with_recomputed_kv_gives_two_spans(oracle: Oracle, other: Oracle) -> None:
    bench = Bench(oracle)
    request = bench.add(prompt(10), max_new=12)
    bench.run(5)
    bench.scheduler.swap(weights_of(other), "1", flush=True)
    bench.run()
    assert request.spans() == [WeightSpan(version="0", start=0, end=5), WeightSpan(version="1", start=5, end=12)]
    ids = request.ids[: request.prompt]
    old, new = oracle.logprobs(ids, request.output), other.logprobs(ids, request.output)
    truth = torch.cat([old[:5], new[5:]])
    assert float((truth - torch.tensor(request.logprobs)).abs().max()) < TOLERANCE
    assert request.kv_versions == [], "every row is by the new weights"
    assert request.retractions == 1


def test_an_update_in_place_goes_on_over_old_kv_and_says_so(oracle: Oracle, other: Oracle) -> None:
    bench = Bench(oracle)
    request = bench.add(prompt(10), max_new=12)
    bench.run(5)
    bench.scheduler.pause("in_place")
    bench.scheduler.swap(weights_of(other), "1", flush=False)
    bench.scheduler.resume()
    bench.run()
    assert [(s.version, s.start, s.end) for s in request.spans()] == [("0", 0, 5), ("1", 5, 12)]
    assert [(s.version, s.start, s.end) for s in request.kv_versions] == [("0", 0, 14), ("1", 14, 21)]
    assert request.retractions == 0
    # what the later tokens must be: the new weights over the rows that the old ones wrote
    model = model_of(oracle)
    model.prefill([Piece(0, 0, request.ids[:14])])
    model.weights = weights_of(other)
    for i in range(5, 12):
        logits = model.decode(torch.tensor([request.ids[9 + i]]), torch.tensor([0]), torch.tensor([9 + i]))
        logp = torch.log_softmax(logits[0], -1)[request.ids[10 + i]]
        assert abs(float(logp) - request.logprobs[i]) < TOLERANCE


def test_cases_30_old_kv_is_never_reused_unseen(oracle: Oracle, other: Oracle) -> None:
    bench = Bench(oracle)
    first = bench.reply(prompt(20), 4)
    bench.scheduler.swap(weights_of(other), "1", flush=True)
    flushed = bench.reply([*first.ids, 5], 4)
    assert (flushed.cached, flushed.kv_versions, bench.scheduler.counters.stale_cached_tokens) == (0, [], 0)
    assert agrees(flushed, other)
    bench.scheduler.swap(weights_of(oracle), "2", flush=False)
    kept = bench.reply([*flushed.ids, 6], 4)
    assert kept.cached == len(flushed.ids) - 1
    assert [(s.version, s.end - s.start) for s in kept.kv_versions] == [("1", kept.cached), ("2", 5)]
    assert bench.scheduler.counters.stale_cached_tokens == kept.cached
    assert bench.scheduler.epoch == 2


def test_cases_29_a_label_aborts_and_recomputes_nothing(oracle: Oracle) -> None:
    bench = Bench(oracle)
    request = bench.add(prompt(10), max_new=10)
    bench.run(4)
    bench.scheduler.relabel("7")
    bench.run()
    assert [(s.version, s.start, s.end) for s in request.spans()] == [("0", 0, 4), ("7", 4, 10)]
    assert agrees(request, oracle)
    assert (request.retractions, bench.scheduler.epoch) == (0, 0)
    assert bench.scheduler.counters.prefill_tokens == 10


def test_weights_that_give_no_number_fail_the_request_not_the_engine(oracle: Oracle) -> None:
    bench = Bench(oracle)
    request = bench.add(prompt(10), max_new=10)
    bench.run(3)
    broken = weights_of(oracle)
    broken.write("model.norm.weight", torch.full((32,), float("nan")))
    bench.scheduler.swap(broken, "1", flush=False)
    bench.run()
    assert "not finite under weight version 1" in request.error
    bench.scheduler.swap(weights_of(oracle), "2", flush=True)
    assert agrees(bench.reply(prompt(10), 4), oracle)


# ------------------------------------------------------------------------------------------------ experts


def rows(request: Request) -> np.ndarray:
    """Expert rows of a reply [rows, MoE layers, top-k]."""
    assert request.experts is not None
    return np.frombuffer(base64.b64decode(request.experts), "<i4").reshape(-1, 1, 2)


def test_s9_a_turn_and_its_delta_equal_a_full_read(expert_oracle: Oracle) -> None:
    bench = Bench(expert_oracle, capture=True)
    first = bench.reply(prompt(20), 6, experts_from=0)
    assert rows(first).shape == (20 + 6 - 1, 1, 2)
    following = first.ids + prompt(8, 1)
    delta = bench.reply(following, 6, experts_from=len(first.ids) - 1, temperature=0.0)
    full = bench.reply(following, 6, experts_from=0, temperature=0.0)
    assert delta.output == full.output
    assert rows(delta).shape == (len(following) + 6 - 1 - (len(first.ids) - 1), 1, 2)
    assert np.array_equal(np.concatenate([rows(first), rows(delta)]), rows(full))
    assert torch.equal(torch.from_numpy(rows(full).copy()).long(), expert_oracle.experts(full.ids[:-1]))
    assert agrees(full, expert_oracle)


def test_experts_come_along_with_copied_and_recomputed_rows(expert_oracle: Oracle) -> None:
    bench = Bench(expert_oracle, capture=True)
    group = [bench.add(prompt(30), max_new=6, experts_from=0) for _ in range(3)]
    bench.run(3)
    bench.scheduler.pause("retract")
    bench.scheduler.resume()
    bench.run()
    for request in group:
        assert torch.equal(torch.from_numpy(rows(request).copy()).long(), expert_oracle.experts(request.ids[:-1]))


def test_experts_are_missing_unless_asked_for_and_captured(expert_oracle: Oracle, tmp_path: Path) -> None:
    assert Bench(expert_oracle, capture=True).reply(prompt(5), 2).experts is None
    assert Bench(expert_oracle).reply(prompt(5), 2, experts_from=0).experts is None
