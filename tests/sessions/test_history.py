"""S4: what a message means, whatever way it is written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.sessions.history import Append, Branch, Retry, Rollback, chained, digest, match, root
from rl360.sessions.messages import Message, ToolCall
from rl360.sessions.replies import Reply
from rl360.sessions.requests import RequestError, parse_message, read
from rl360.sessions.seen import Seen, unread
from rl360.sessions.turns import Tree, Turn, reply_message

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXT,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXT, x, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.builds(ToolCall, name=TEXT, arguments=st.dictionaries(TEXT, JSON, max_size=3)), max_size=2).map(tuple)
MESSAGES = st.one_of(
    st.builds(Message, role=st.sampled_from(["system", "user", "tool"]), content=TEXT),
    st.builds(Message, role=st.just("assistant"), content=TEXT, tool_calls=CALLS),
)


def written(m: Message, rng: random.Random) -> bytes:
    """The message as one harness or another would send it."""
    content: Any = m.content
    if content and rng.random() < 0.4:
        cut = rng.randint(0, len(content))
        content = [{"type": "text", "text": content[:cut]}, {"text": content[cut:], "type": "text", "cache": True}]
    if m.role == "assistant" and not m.content and rng.random() < 0.5:
        content = None
    data: dict[str, Any] = {"role": "developer" if m.role == "system" and rng.random() < 0.5 else m.role, "content": content}
    if m.tool_calls or (m.role == "assistant" and rng.random() < 0.3):
        data["tool_calls"] = [
            {"id": f"call_{rng.random()}", "type": "function", "function": {"name": c.name, "arguments": arguments(c.arguments, rng)}}
            for c in m.tool_calls
        ]
    items = list(data.items())
    rng.shuffle(items)
    return json.dumps(dict(items), ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1))).encode()


def arguments(value: dict[str, Any], rng: random.Random) -> Any:
    shuffled = shuffle(value, rng)
    if rng.random() < 0.1:
        return shuffled
    return json.dumps(shuffled, ensure_ascii=rng.random() < 0.5, separators=rng.choice(((",", ":"), (", ", ": "), (" ,  ", " :\n"))))


def shuffle(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        items = [(k, shuffle(v, rng)) for k, v in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        return [shuffle(v, rng) for v in value]
    return float(value) if type(value) is int and abs(value) < 2**50 and rng.random() < 0.3 else value


@given(MESSAGES, st.integers())
@settings(max_examples=150, deadline=None)
def test_s4_always_a_message_means_the_same_however_it_is_written(message: Message, seed: int) -> None:
    assert digest(parse_message(written(message, random.Random(seed)), 0)) == digest(message)


@given(MESSAGES, MESSAGES)
@settings(max_examples=100, deadline=None)
def test_s4_other_messages_mean_something_else(a: Message, b: Message) -> None:
    def meaning(m: Message) -> Any:
        calls = [(c.name, c.arguments) for c in m.tool_calls]
        return m.role, m.content.strip() if m.role == "assistant" else m.content, json.dumps(calls, sort_keys=True)

    assert (digest(a) == digest(b)) == (meaning(a) == meaning(b))


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(MESSAGES, min_size=1, max_size=3)), min_size=1, max_size=5), st.integers())
@settings(max_examples=60, deadline=None)
def test_what_a_session_has_seen_never_changes_what_a_request_means(steps: list[tuple[int, list[Message]]], seed: int) -> None:
    rng, seen = random.Random(seed), Seen()
    conversation: list[Message] = []
    for keep, new in steps:
        conversation = [*conversation[:keep], *new, Message(role="user", content="?")]
        raw = b",".join(written(m, rng) for m in conversation)
        tools = rng.choice((b"null", b'[{"type":"function","function":{"name":"f"}}]'))
        body = b'{"messages":[' + raw + b'],"tools":' + tools + b"}"
        got, fresh = read(unread(body, seen), seen), read(unread(body, Seen()), Seen())
        assert (got.chain, got.roles, got.tools) == (fresh.chain, fresh.roles, fresh.tools)
        assert got.chain == chained(root(got.tools), [digest(m) for m in conversation])


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "tool_calls", "function"]), x),
    max_leaves=12,
)


@given(st.lists(ANY_JSON, max_size=3), ANY_JSON)
@settings(max_examples=150, deadline=None)
def test_case22_always_a_body_is_read_or_refused(messages: list[Any], tools: Any) -> None:
    for data in (json.dumps({"messages": messages, "tools": tools}).encode(), json.dumps(messages).encode()):
        assert status(data) in (200, 400, 422)


def status(data: bytes) -> int:
    try:
        return 200 if read(unread(data, Seen()), Seen()).roles else 500
    except RequestError as e:
        return e.status if e.message and e.code else 500


def test_arguments_that_are_nested_without_end_are_refused() -> None:
    deep = '{"a":' * 500 + "1" + "}" * 500
    raw = json.dumps({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}).encode()
    with pytest.raises(RequestError, match="nested more than 64 deep"):
        parse_message(raw, 3)


# ---------------------------------------------------------------------------------------------------- places in a tree

U, V, W = (Message(role="user", content=c) for c in "uvw")


class Story:
    """Turns committed by hand; replies are "r1", "r2", …"""

    def __init__(self) -> None:
        self.tree = Tree()

    def reply(self, n: int) -> Message:
        return reply_message(Reply(content=f"r{n}"))

    def place(self, *messages: Message) -> Any:
        return match(self.tree, chained(root([]), [digest(m) for m in messages]), [m.role for m in messages])

    def ask(self, *messages: Message) -> Any:
        place = self.place(*messages)
        n = len(self.tree.turns) + 1
        chain = chained(root([]), [digest(m) for m in (*messages, self.reply(n))])
        self.tree.commit(
            Turn(
                number=n,
                branch=0,
                parent=place.parent,
                asked=chain[-2],
                told=chain[-1],
                fragment=b"1",
                total=n,
                prompt_tokens=1,
                output_tokens=1,
                cached_tokens=0,
                reply=Reply(content=f"r{n}"),
                finish_reason="stop",
                request_id=f"q{n}",
                ended=0.0,
                rolled_back=place.dropped if isinstance(place, Rollback) else 0,
            )
        )
        return place


def test_s4_places() -> None:
    s = Story()
    assert s.ask(U) == Append(0, 0)
    assert s.place(U) == Retry(1)
    assert s.ask(U, s.reply(1), V) == Append(1, 2)
    # the last reply dropped, or rewritten: roll back turn 2
    assert s.place(U, s.reply(1), V, W) == Rollback(1, 2, 2)
    assert s.place(U, s.reply(1), V, Message(role="assistant", content="no"), W) == Rollback(1, 2, 2)
    # more than one reply of another origin, another question, or a reply that something was built on: a branch
    no = Message(role="assistant", content="no")
    assert s.place(U, s.reply(1), V, no, W, no, W) == Branch(1, 2)
    assert s.place(U, s.reply(1), W) == Branch(1, 2)
    assert s.place(U, V) == Branch(0, 0)
    assert s.place(V) == Branch(0, 0)


def test_s4_a_rolled_back_turn_is_not_rolled_back_again() -> None:
    s = Story()
    s.ask(U)
    assert s.ask(U, V) == Rollback(0, 0, 1)
    assert s.place(U, W) == Branch(0, 0)
    assert s.place(U, V, W) == Rollback(0, 0, 2)
    assert s.place(U, s.reply(1), W) == Branch(1, 2)
    assert s.place(U) == Retry(1)


def test_a_turn_that_continues_nothing_is_no_turn() -> None:
    s = Story()
    s.ask(U)
    with pytest.raises(ValueError, match="can't follow 1 turns"):
        s.tree.commit(s.tree.get(1))
