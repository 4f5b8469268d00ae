"""S1, S3 to S5, S7 and CASES 13 to 22 at the server's door."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl360.bus.events import SessionClosed, SessionOpened, TurnCompleted
from rl360.config import Engine, Sampling, Sessions
from rl360.sessions.client import OpenSession, SessionError
from rl360.sessions.names import session_key
from tests.sessions.conftest import ADMIN, BASH, SESSION, Rig
from tests.sessions.fake_engine import call, hang, ids_of, status
from tests.sessions.tokens import tokenizer

USER: dict[str, Any] = {"role": "user", "content": "list files"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}


def answer_of(body: Any) -> dict[str, Any]:
    return body["choices"][0]["message"]


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1_0", "content": content}


# ---------------------------------------------------------------------------------------------------- S1


async def test_s1_the_next_prompt_is_the_stored_ids_and_the_new_messages(rig: Rig) -> None:
    rig.engine.script = [call("ls"), "done"]
    _, first = await rig.chat([SYSTEM, USER])
    code, second = await rig.chat([SYSTEM, USER, answer_of(first), tool("a.py")])
    assert code == 200
    assert answer_of(second)["content"] == "done"
    one, two = rig.engine.requests
    sampled = ids_of(call("ls"))
    suffix = tokenizer().encode_marked("<|im_start|>tool\na.py<|im_end|>") + tokenizer().encode_marked("<|im_start|>assistant\n")
    assert two["input_ids"] == one["input_ids"] + sampled + suffix
    turns = await rig.events(TurnCompleted)
    assert [(t.turn, t.parent, t.base, t.branch) for t in turns] == [(1, 0, 0, 0), (2, 1, len(one["input_ids"]) + len(sampled), 0)]
    assert rig.ids(turns[0].prompt_ids) == one["input_ids"]
    assert rig.ids(turns[0].output_ids) == sampled
    assert rig.ids(turns[1].prompt_ids) == suffix
    assert (turns[0].best_cached, turns[1].best_cached) == (0, turns[1].base - 1)


async def test_s1_a_sampled_spelling_that_no_tokenizer_would_choose_is_kept(rig: Rig) -> None:
    odd = [tokenizer().encode(c)[0] for c in "bash"] + [tokenizer().special("<|im_end|>")]
    assert odd != ids_of("bash")

    def letters(body: dict[str, Any]) -> dict[str, Any]:
        rows = [[-1.0, t, None] for t in odd]
        return rig.engine.reply(body, output_ids=odd, output_token_logprobs=rows, completion_tokens=5, weight_versions=[])

    rig.engine.script = [letters]
    _, first = await rig.chat([USER])
    await rig.chat([USER, answer_of(first), USER])
    prompt = rig.engine.requests[1]["input_ids"]
    n = len(rig.engine.requests[0]["input_ids"])
    assert prompt[n : n + 5] == odd


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt_token_ids": [1, 2]}, "not the ones that were sent"),
        ({"prompt_token_ids": None}, "no prompt_token_ids"),
        ({"output_token_logprobs": [[-1.0, 5, None]]}, "not the same"),
        ({"weight_version": "default", "weight_versions": []}, "not a policy version"),
        ({"weight_versions": [{"version": "0", "start": 0, "end": 1}]}, "don't cover"),
        ({"prompt_tokens": 3}, "counted 3 prompt tokens"),
        ({"output_ids": [], "output_token_logprobs": [], "completion_tokens": 0}, "not the same"),
    ],
)
async def test_s1_a_reply_that_breaks_the_contract_is_no_turn(rig: Rig, change: dict[str, Any], why: str) -> None:
    rig.engine.script = [lambda body: rig.engine.reply(body, **change)]
    code, body = await rig.chat([USER])
    assert code == 502
    assert (body["error"]["boundary"], body["error"]["cause"]) == ("engine", "refused")
    assert why in body["error"]["message"]
    assert await rig.events(TurnCompleted) == []
    code, _ = await rig.chat([USER])
    assert code == 200
    assert rig.engine.requests[0]["rid"] != rig.engine.requests[1]["rid"]


# ---------------------------------------------------------------------------------------------------- S3


async def test_s3_flags_and_sampling_are_the_runs_whatever_the_agent_asks(rig: Rig) -> None:
    code, body = await rig.chat(
        [USER],
        temperature=0.0,
        top_p=0.1,
        max_tokens=1,
        logprobs=False,
        return_prompt_token_ids=False,
        seed=1,
        extra={"a": 1},
    )
    assert code == 200
    sent = rig.engine.requests[0]
    assert sent["return_logprob"] is True
    assert sent["return_prompt_token_ids"] is True
    assert "return_routed_experts" not in sent
    params = sent["sampling_params"]
    assert (params["temperature"], params["max_new_tokens"], params["top_p"], params["no_stop_trim"]) == (1.0, 64, 1.0, False)
    assert params["stop_token_ids"] == [tokenizer().special("<|im_end|>")]
    assert len(body["choices"]) == 1


async def test_s3_the_agent_sees_no_token_and_no_routing(rig: Rig) -> None:
    _, body = await rig.chat([USER])
    text = str(body)
    assert "token_ids" not in text
    assert "routed" not in text
    assert body["choices"][0]["logprobs"] is None


async def test_headers_keep_a_session_on_its_engine_and_carry_the_trace(rig: Rig) -> None:
    await rig.chat([USER])
    headers = rig.engine.headers[0]
    assert headers["x-smg-routing-key"] == SESSION
    assert headers["traceparent"].startswith("00-")
    assert headers["x-request-id"] == rig.engine.requests[0]["rid"]


# ---------------------------------------------------------------------------------------------------- S4


async def test_s4_case16_a_reserialised_history_is_the_same_history(rig: Rig) -> None:
    rig.engine.script = [call("ls"), "done"]
    await rig.chat([SYSTEM, USER])
    again = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"type": "function", "id": "other", "function": {"arguments": '{ "command" :"ls"}', "name": "bash"}}],
    }
    system = {"content": [{"type": "text", "text": "Be "}, {"text": "brief.", "type": "text"}], "role": "developer"}
    code, _ = await rig.chat([system, USER, again, tool([{"type": "text", "text": "a.py"}])])
    assert code == 200
    turns = await rig.events(TurnCompleted)
    assert [(t.parent, t.branch, t.rolled_back) for t in turns] == [(0, 0, 0), (1, 0, 0)]


async def test_s4_a_dropped_trailing_reply_rolls_back_one_turn(rig: Rig) -> None:
    rig.engine.script = [call("ls"), "<tool_call>oops", "done"]
    _, first = await rig.chat([USER])
    base = [USER, answer_of(first), tool("a.py")]
    _, bad = await rig.chat(base)
    assert answer_of(bad)["content"] == "<tool_call>oops"
    code, _ = await rig.chat([*base, {"role": "user", "content": "error: invalid tool call"}])
    assert code == 200
    turns = await rig.events(TurnCompleted)
    assert [(t.turn, t.parent, t.branch, t.rolled_back, t.format_error) for t in turns] == [
        (1, 0, 0, 0, False),
        (2, 1, 0, 0, True),
        (3, 1, 0, 2, False),
    ]
    assert await rig.metric("rollbacks") == 1
    assert turns[2].best_cached == turns[1].base + len(rig.ids(turns[1].prompt_ids)) - len(tokenizer().encode("assistant\n"))


async def test_s4_a_rewritten_trailing_reply_rolls_back_one_turn(rig: Rig) -> None:
    await rig.chat([USER])
    code, _ = await rig.chat([USER, {"role": "assistant", "content": "something else"}, USER])
    assert code == 200
    turns = await rig.events(TurnCompleted)
    assert [(t.parent, t.rolled_back) for t in turns] == [(0, 0), (0, 1)]


async def test_s4_any_other_divergence_branches(rig: Rig) -> None:
    _, first = await rig.chat([SYSTEM, USER])
    await rig.chat([SYSTEM, USER, answer_of(first), USER])
    await rig.chat([SYSTEM, USER, answer_of(first), {"role": "user", "content": "rather this"}])
    await rig.chat([{"role": "system", "content": "Another."}, USER])
    turns = await rig.events(TurnCompleted)
    assert [(t.turn, t.parent, t.branch) for t in turns] == [(1, 0, 0), (2, 1, 0), (3, 1, 1), (4, 0, 2)]
    closed = await rig.client.close(SESSION, "done")
    assert (closed.turns, closed.branches) == (4, 3)


async def test_s4_other_tools_are_another_conversation(rig: Rig) -> None:
    _, first = await rig.chat([USER])
    await rig.chat([USER, answer_of(first), USER], tools=[])
    assert [t.branch for t in await rig.events(TurnCompleted)] == [0, 1]


async def test_s4_reject_refuses_a_divergence_and_keeps_the_session(make_rig: Any) -> None:
    rig = await make_rig(sessions=Sessions(divergence="reject"))
    await rig.open()
    _, first = await rig.chat([SYSTEM, USER])
    base = [SYSTEM, USER, answer_of(first)]
    await rig.chat([*base, USER])
    code, body = await rig.chat([{"role": "system", "content": "Another."}, USER])
    assert (code, body["error"]["code"]) == (409, "history_diverged")
    code, _ = await rig.chat([*base, USER])
    assert code == 200


# ---------------------------------------------------------------------------------------------------- S5


async def test_s5_case14_a_retry_gets_the_recorded_answer(rig: Rig) -> None:
    rig.engine.script = [call("ls"), "other"]
    one = await rig.chat([USER], request_id="a")
    assert await rig.chat([USER], request_id="a") == one
    assert await rig.chat([USER], request_id="b") == one  # same history
    assert await rig.chat([USER]) == one
    assert len(rig.engine.requests) == 1
    assert len(await rig.events(TurnCompleted)) == 1
    assert await rig.metric("repeated_answers") == 3


async def test_s5_case13_two_requests_at_once_are_one_turn_after_the_other(rig: Rig) -> None:
    release = asyncio.Event()
    rig.engine.script = [hang(release, rig.engine, "first")]
    one = asyncio.create_task(rig.chat([USER], request_id="a"))
    await asyncio.wait_for(rig.engine.arrived.wait(), 5)
    same = asyncio.create_task(rig.chat([USER], request_id="a"))
    other = asyncio.create_task(rig.chat([{"role": "user", "content": "else"}], request_id="b"))
    release.set()
    (_, first), (_, second), (_, third) = await asyncio.gather(one, same, other)
    assert first == second
    assert answer_of(third)["content"] == "ok"
    assert [t.request_id for t in await rig.events(TurnCompleted)] == ["a", "b"]


async def test_s5_case15_a_bad_request_changes_nothing(rig: Rig) -> None:
    _, first = await rig.chat([USER])
    for bad in ([], [{"role": "robot", "content": "x"}], [USER, {"role": "user", "content": None}]):
        code, _ = await rig.chat(bad)
        assert code == 400
    code, _ = await rig.chat([USER, answer_of(first), USER])
    assert code == 200
    assert [t.parent for t in await rig.events(TurnCompleted)] == [0, 1]


async def test_s5_an_agent_that_hangs_up_finds_its_answer_on_retry(rig: Rig) -> None:
    release = asyncio.Event()
    rig.engine.script = [hang(release, rig.engine, "kept")]
    gone = asyncio.create_task(rig.chat([USER], request_id="a"))
    await asyncio.wait_for(rig.engine.arrived.wait(), 5)
    gone.cancel()
    release.set()
    _, body = await rig.chat([USER], request_id="a")
    assert answer_of(body)["content"] == "kept"
    assert len(rig.engine.requests) == 1


# ---------------------------------------------------------------------------------------------------- S7


async def test_s7_case21_truncation_ends_the_session(make_rig: Any) -> None:
    rig = await make_rig(sampling=Sampling(max_new_tokens=3, context=512))
    await rig.open()
    rig.engine.script = ["a long reply that is cut off"]
    code, first = await rig.chat([USER], request_id="a")
    assert (code, first["choices"][0]["finish_reason"]) == (200, "length")
    code, body = await rig.chat([USER, answer_of(first), USER])
    assert (code, body["error"]["code"], body["error"]["reason"]) == (404, "session_ended", "length")
    assert body["error"]["message"].startswith("session_ended: length")
    assert await rig.chat([USER], request_id="a") == (200, first)  # S5 holds after the end
    assert len(rig.engine.requests) == 1


async def test_s7_a_conversation_that_no_longer_fits_ends_the_session(make_rig: Any) -> None:
    rig = await make_rig(sampling=Sampling(max_new_tokens=64, context=70))
    await rig.open()
    _, first = await rig.chat([USER])
    used = len(rig.engine.requests[0]["input_ids"])
    assert rig.engine.requests[0]["sampling_params"]["max_new_tokens"] == min(64, 70 - used)
    for size in (60, 100_000):
        code, body = await rig.chat([USER, answer_of(first), {"role": "user", "content": "q" * size}])
        assert (code, body["error"]["code"], body["error"]["reason"]) == (404, "session_ended", "context")
    code, body = await rig.chat([USER, answer_of(first), USER])
    assert (code, body["error"]["reason"]) == (404, "context")
    assert len(rig.engine.requests) == 1


async def test_s7_a_closed_session_takes_no_turn(rig: Rig) -> None:
    await rig.chat([USER])
    assert await rig.client.close(SESSION, "submitted") == await rig.client.close(SESSION, "again")
    code, body = await rig.chat([USER, USER])
    assert (code, body["error"]["reason"]) == (404, "closed")
    assert [(e.reason, e.turns) for e in await rig.events(SessionClosed)] == [("submitted", 1)]
    with pytest.raises(SessionError) as e:
        await rig.open()
    assert e.value.status == 409


async def test_closing_gives_up_the_call_in_flight(rig: Rig) -> None:
    release = asyncio.Event()
    rig.engine.script = [hang(release, rig.engine)]
    turn = asyncio.create_task(rig.chat([USER]))
    await asyncio.wait_for(rig.engine.arrived.wait(), 5)
    closed = await rig.client.close(SESSION, "timeout")
    assert closed.turns == 0
    code, body = await turn
    assert (code, body["error"]["reason"]) == (404, "closed")
    assert await rig.events(TurnCompleted) == []


# ---------------------------------------------------------------------------------------------------- engine failures


async def test_an_engine_that_fails_is_asked_again_under_the_same_id(rig: Rig) -> None:
    rig.engine.script = [status(500), status(404, "No worker available"), status(503), "ok"]
    code, _ = await rig.chat([USER])
    assert code == 200
    assert len({r["rid"] for r in rig.engine.requests}) == 1
    assert [t.retries for t in await rig.events(TurnCompleted)] == [3]


async def test_an_aborted_reply_is_never_a_turn(rig: Rig) -> None:
    rig.engine.script = [lambda b: rig.engine.reply(b, "part", finish_reason={"type": "abort", "message": "paused"}), "whole"]
    _, body = await rig.chat([USER])
    assert answer_of(body)["content"] == "whole"
    assert len(await rig.events(TurnCompleted)) == 1


async def test_s24_a_reply_of_an_older_version_than_the_sessions_floor_is_asked_for_again(rig: Rig) -> None:
    session = "t3-g004-a2.1"
    await rig.open(session, min_version=4)

    def old(body: dict[str, Any]) -> dict[str, Any]:
        reply = rig.engine.reply(body)
        rig.engine.version = "4"
        return reply

    rig.engine.version, rig.engine.script = "3", [old]
    code, _ = await rig.chat([USER], session=session)
    assert code == 200
    assert [t.spans[0].version for t in await rig.events(TurnCompleted)] == [4]


async def test_s13_a_dead_engine_is_a_typed_error_within_the_deadline(make_rig: Any) -> None:
    rig = await make_rig(engine=Engine(request_timeout=0.4))
    await rig.open()
    rig.engine.script = [status(503)] * 20
    code, body = await rig.chat([USER])
    assert (code, body["error"]["boundary"], body["error"]["cause"]) == (502, "engine", "lost")
    release = asyncio.Event()
    rig.engine.script = [hang(release, rig.engine)]
    code, body = await rig.chat([USER])
    release.set()
    assert (code, body["error"]["cause"], body["error"]["code"]) == (504, "timeout", "engine_timeout")
    await rig.engine.stop()
    code, body = await rig.chat([USER])
    assert (code, body["error"]["boundary"]) == (502, "gateway")
    await rig.engine.start()


async def test_an_engine_that_refuses_is_not_asked_again(rig: Rig) -> None:
    rig.engine.script = [status(400, "bad id")]
    code, body = await rig.chat([USER])
    assert (code, body["error"]["cause"], len(rig.engine.requests)) == (502, "refused", 1)
    assert "bad id" in body["error"]["message"]


# ---------------------------------------------------------------------------------------------------- doors and bodies


async def test_a_key_opens_its_own_session_only(rig: Rig) -> None:
    other = "t3-g004-a2.1"
    await rig.open(other)
    code, body = await rig.chat([USER], key=session_key(ADMIN, other))
    assert (code, body["error"]["code"]) == (403, "wrong_key")
    async with rig.http.post(f"{rig.url}/sessions/{SESSION}/v1/chat/completions", json={"messages": [USER]}) as r:
        assert r.status == 401
    for key, wanted in ((session_key(ADMIN, SESSION), 403), ("", 401)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with rig.http.delete(f"{rig.url}/sessions/{SESSION}", headers=headers) as r:
            assert r.status == wanted
    assert await rig.events(SessionClosed) == []


@pytest.mark.parametrize(
    ("body", "code", "why"),
    [
        (b"", 400, "truncated"),
        (b'{"messages": [}', 400, "malformed"),
        (b"[1]", 400, "Expected `object`"),
        (b'{"model": "policy"}', 400, "messages"),
        (b'{"messages": []}', 400, "empty"),
        (b'{"messages": "hi"}', 400, "messages"),
        (b'{"messages": [1]}', 400, "messages[0]"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', 400, "unknown role 'robot'"),
        (b'{"messages": [{"role": "user"}]}', 400, "needs content"),
        (b'{"messages": [{"role": "user", "content": 5}]}', 400, "messages[0]"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', 400, "nothing to answer"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "request body"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}', 400, "stream"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web"}]}', 400, "tools"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', 400, "content[0]"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}', 400, "not an object"),
        (b'{"messages": [{"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}', 422, "text only"),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 2**20 + b'"}]}', 413, ""),
        (b'{"messages": [' + b"[" * 100_000 + b"]}", 400, ""),
    ],
)
async def test_case22_wrong_input_gets_a_4xx_with_a_reason(rig: Rig, body: bytes, code: int, why: str) -> None:
    got, reply = await rig.post(body)
    assert got == code, reply
    error = reply["error"]
    assert why in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert rig.engine.requests == []


async def test_case22_a_ten_megabyte_body_is_served_where_the_recipe_allows_it(make_rig: Any) -> None:
    rig = await make_rig(sessions=Sessions(max_body_mb=16), sampling=Sampling(max_new_tokens=64, context=512))
    await rig.open()
    code, body = await rig.chat([USER, {"role": "user", "content": "x" * 10_000_000}])
    assert (code, body["error"]["reason"]) == (404, "context")  # read, and found too long; not refused for its size


async def test_unknown_paths_and_methods_are_openai_errors(rig: Rig) -> None:
    async with rig.http.get(f"{rig.url}/v2") as r:
        assert (r.status, (await r.json())["error"]["code"]) == (404, "not_found")
    async with rig.http.put(f"{rig.url}/sessions") as r:
        assert (r.status, (await r.json())["error"]["code"]) == (405, "method_not_allowed")


async def test_a_session_that_nobody_opened_is_404(rig: Rig) -> None:
    for name in ("t3-g004-a7.1", "nonsense"):
        code, body = await rig.chat([USER], session=name)
        assert (code, body["error"]["code"]) == (404, "session_not_found")


async def test_opening_is_idempotent_and_checks_the_name(rig: Rig) -> None:
    await rig.open()
    await rig.open()
    assert len(await rig.events(SessionOpened)) == 1
    with pytest.raises(SessionError) as e:
        await rig.client.open(OpenSession(attempt="t3-g004-a1", step=4, group=4, session=SESSION))
    assert e.value.status == 400


async def test_status_shows_where_a_session_stands(rig: Rig) -> None:
    await rig.chat([USER])
    async with rig.http.get(f"{rig.url}/sessions/{SESSION}", headers={"Authorization": f"Bearer {ADMIN}"}) as r:
        body = await r.json()
    assert (body["turns"], body["branches"], body["ended"]) == (1, 1, "")
    assert body["tokens"] == len(rig.engine.requests[0]["input_ids"]) + len(ids_of("ok"))


async def test_format_errors_are_marked_and_told_to_the_agent_as_text(rig: Rig) -> None:
    rig.engine.script = ['<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>']
    _, body = await rig.chat([USER], tools=[BASH])
    assert "tool_calls" not in answer_of(body)
    assert answer_of(body)["content"].startswith("<tool_call>")
    assert [t.format_error for t in await rig.events(TurnCompleted)] == [True]
