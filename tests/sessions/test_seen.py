"""What is left out of the parsing never changes what a request or a reply means (S1, S4, S5)."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.sessions.requests import RequestError, read
from rl360.sessions.sampled import EngineReply, Refused, check, parse, rest
from rl360.sessions.seen import Seen, unread

TOOLS = b'[{"type":"function","function":{"name":"f"}}]'
MESSAGES = [
    b'{"role":"user","content":"a"}',
    b'{"role":"user","content":"a]},{"}',
    b'{"content":"0","role":"assistant"}',
    b'{"role":"tool", "content":"\\"messages\\":["}',
]
BAD = [b"0", b"null", b'{"role":"nobody","content":""}', b"{]", b'{"role":"user","content":7}']


def body(messages: list[bytes], rng: random.Random) -> bytes:
    """A body as a harness might send it, now and then as none would."""
    space = rng.choice((b"", b"", b" ", b"\n\t "))
    array = b"[" + space + (b"," + space).join(messages) + space + rng.choice((b"]",) * 9 + (b",]", b"")) + space
    before = rng.choice((b"", b'"model":"m",', b'"x":{"messages":' + array + b"},", b'"messages":' + array + b","))
    after = rng.choice((b"", b"", b',"tools":' + TOOLS, b',"messages":[0]', b',"messages":[' + MESSAGES[0] + b"]", b',"stream":1'))
    return b"{" + (before if rng.random() < 0.3 else b"") + b'"messages":' + array + after + b"}"


def meaning(data: bytes, seen: Seen) -> Any:
    try:
        got = read(unread(data, seen), seen)
    except RequestError as e:
        return e.status, e.code, e.message, e.param
    return got.chain, got.roles, got.tools, got.stream, got.messages(0)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.lists(st.sampled_from(MESSAGES * 3 + BAD), max_size=3)), min_size=2, max_size=6), st.integers()
)
@settings(max_examples=600, deadline=None)
def test_s5_always_a_request_means_the_same_whatever_was_seen_before(steps: list[tuple[int, list[bytes]]], seed: int) -> None:
    seen, conversation, rng = Seen(), list[bytes](), random.Random(seed)
    for keep, new in steps:
        conversation = conversation[:keep] + new
        for data in (body(conversation, rng), body([*conversation, MESSAGES[0]], rng)):
            assert meaning(data, seen) == meaning(data, Seen())


def test_known_messages_are_left_out_of_what_is_parsed() -> None:
    seen = Seen()
    old = {"role": "user", "content": "x" * 1000}
    for turn in range(1, 5):
        data = json.dumps({"model": "m", "messages": [old] * turn, "tools": None, "stream": False}).encode()
        left = unread(data, seen)
        assert left.known == turn - 1
        assert len(left.text) < 1200
        read(left, seen)
    rewritten = json.dumps({"model": "m", "messages": [old, old, {"role": "user", "content": "y"}], "tools": None}).encode()
    assert unread(rewritten, seen).known == 2


def reply(echo: Any) -> dict[str, Any]:
    meta = {
        "id": "r",
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "cached_tokens": 0,
        "weight_version": "0",
        "output_token_logprobs": [[-0.5, 9, None]],
    }
    return {"text": '"prompt_token_ids":[17,4,256]', "output_ids": [9], "prompt_token_ids": echo, "meta_info": meta}


def accepted(content: bytes) -> bool:
    prompt = b"17,4,256"
    try:
        check(parse(rest(content, prompt), content), prompt=prompt, prompt_tokens=3, min_version=0)
    except Refused:
        return False
    return True


@pytest.mark.parametrize(
    "echo", [[17, 4], [17, 4, 256, 1], [17, 4, 25], [17, 4, 2560], [], [[17, 4, 256]], ["17,4,256"], None, True, "17,4,256"]
)
def test_s1_any_other_echo_is_refused_however_it_is_written(echo: Any) -> None:
    assert not accepted(msgspec.json.encode(reply(echo)))
    assert not accepted(json.dumps(reply(echo), indent=1).encode())


def test_s1_an_equal_echo_is_accepted_however_it_is_written_and_not_parsed_when_its_bytes_are_equal() -> None:
    content = msgspec.json.encode(reply([17, 4, 256]))
    assert accepted(content)
    assert accepted(json.dumps(reply([17, 4, 256]), indent=1).encode())
    assert rest(content, b"17,4,256") == content.replace(b'"prompt_token_ids":[17,4,256]', b'"prompt_token_ids":[]')


def test_s1_an_echo_elsewhere_in_the_reply_is_not_the_echo() -> None:
    """Ids that stand under the same name in another object are left alone."""
    nested = {"x": {"prompt_token_ids": [17, 4, 256]}}
    assert not accepted(msgspec.json.encode({**nested, **reply([17, 4])}))
    assert accepted(msgspec.json.encode({**nested, **reply([17, 4, 256])}))
    content = msgspec.json.encode({**nested, **{k: v for k, v in reply(None).items() if k != "prompt_token_ids"}})
    assert not accepted(content)
    assert isinstance(parse(rest(content, b"17,4,256"), content), EngineReply)
