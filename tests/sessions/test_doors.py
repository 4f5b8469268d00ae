"""What an agent sends that can't be served is a 4xx in OpenAI's shape with the reason, never a 500 and never a traceback in the log."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.config import Sessions
from rl360.sessions.messages import DEPTH, parse_object
from rl360.sessions.names import parse_session, session_key
from rl360.sessions.templates import TemplateError
from rl360.sessions.unreadable import reason
from tests.sessions.conftest import ADMIN, SESSION, Rig

USER: dict[str, Any] = {"role": "user", "content": "list files"}
PATH = f"/sessions/{SESSION}/v1/chat/completions"
KEY = session_key(ADMIN, SESSION).encode()
BODY = json.dumps({"messages": [USER]}).encode()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Any:
    """Nothing that an agent sends is a server's error."""
    yield
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def send(rig: Rig, *, headers: bytes = b"", body: bytes = BODY, path: str = PATH, key: bytes = KEY, method: str = "POST") -> Any:
    """Status and OpenAI error of a request that a client library wouldn't send."""
    place = urlsplit(rig.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n".encode()
    writer.write(head + b"Authorization: Bearer " + key + b"\r\n" + headers + b"\r\n" + body)
    async with asyncio.timeout(10):
        start, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    error = json.loads(content).get("error", {})
    if error:
        assert error["type"] == "invalid_request_error"
        assert error["code"]
        assert error["message"]
    return int(start.split()[1]), error


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


@pytest.mark.parametrize("depth", [DEPTH + 1, 500, 900])
async def test_a_tools_schema_has_the_depth_limit_that_arguments_have(rig: Rig, depth: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
    code, body = await rig.chat([USER], tools=[tool])
    assert (code, body["error"]["param"]) == (400, "tools[0].function.parameters")
    assert f"nested more than {DEPTH} deep" in body["error"]["message"]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested(depth)}}]}
    code, body = await rig.chat([USER, call, USER])
    assert (code, f"nested more than {DEPTH} deep" in body["error"]["message"]) == (400, True)


async def test_a_schema_and_arguments_as_deep_as_allowed_are_served(rig: Rig) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(DEPTH)}}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested(DEPTH)}}]}
    assert (await rig.chat([USER, call, USER], tools=[tool]))[0] == 200


@pytest.mark.parametrize(
    "schema", [{"properties": 5}, {"properties": [1]}, {"required": 5}, {"required": [[]]}, {"required": [1]}, {"required": {"a": 1}}]
)
async def test_a_schema_that_is_none_is_refused_before_anything_is_sampled(rig: Rig, schema: Any) -> None:
    code, body = await rig.chat([USER], tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    assert (code, body["error"]["param"]) == (400, "tools[0].function.parameters")
    assert rig.engine.requests == []


async def test_numbers_of_any_size_are_a_conversation(rig: Rig) -> None:
    """A whole float beyond 64 bits is no integer that JSON's encoder can write: not in a schema, in arguments, or in a reply."""
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"maximum": 1e300, "minimum": -(10**40)}}}
    rig.engine.script = ['<tool_call>\n{"name": "bash", "arguments": {"n": 1e30, "m": 123456789012345678901234567890}}\n</tool_call>']
    code, body = await rig.chat([USER], tools=[tool])
    assert code == 200, body
    reply = body["choices"][0]["message"]
    code, body = await rig.chat([USER, reply, USER], tools=[tool])
    assert code == 200, body
    assert await rig.metric("branches") == 0


@pytest.mark.parametrize("key", [b"\xe9\xff", "clé".encode(), b"\xed\xa0\x80"])
async def test_a_key_of_any_bytes_is_a_wrong_key(rig: Rig, key: bytes) -> None:
    for method, path in (("POST", PATH), ("GET", f"/sessions/{SESSION}"), ("POST", "/sessions"), ("DELETE", f"/sessions/{SESSION}")):
        code, error = await send(rig, key=key, method=method, path=path)
        assert (code, error["code"]) == (403, "wrong_key")


@pytest.mark.parametrize("path", ["/sessions/%ff%ed%a0%80/v1/models", "/sessions/%00%0d%0a/v1/models", "/sessions/é/v1/models"])
async def test_a_session_of_any_bytes_is_refused(rig: Rig, path: str) -> None:
    code, _ = await send(rig, path=path, method="GET", body=b"")
    assert 400 <= code < 500


PACKED = gzip.compress(BODY, mtime=0)


@pytest.mark.parametrize("path", [PATH, "/sessions"])
@pytest.mark.parametrize(
    ("coding", "body", "code", "why"),
    [
        (b"gzip", BODY, 400, "the body is none"),
        (b"gzip", b"", 400, "ends before its end"),
        (b"gzip", PACKED[:-6], 400, "ends before its end"),
        (b"gzip", PACKED[:-8] + bytes(8), 400, "the body is none"),
        (b"gzip", PACKED + PACKED, 400, "something follows"),
        (b"deflate", BODY, 400, "the body is none"),
        (b"gzip", gzip.compress(bytes(2**24)), 413, "once it is unpacked"),
        (b"br", BODY, 415, "plain, or as gzip or deflate"),
        (b"zstd", BODY, 415, "plain, or as gzip or deflate"),
        (b"gzip, gzip", gzip.compress(PACKED), 415, "plain, or as gzip or deflate"),
        (b"\xff", BODY, 415, "plain, or as gzip or deflate"),
    ],
    ids=[
        "plain as gzip",
        "nothing",
        "cut off",
        "no check sum",
        "two of them",
        "plain as deflate",
        "too large",
        "br",
        "zstd",
        "twice",
        "no name",
    ],
)
async def test_a_body_that_cant_be_unpacked_is_refused_with_the_reason(
    rig: Rig, path: str, coding: bytes, body: bytes, code: int, why: str
) -> None:
    got, error = await send(
        rig, headers=b"Content-Encoding: " + coding + b"\r\n", body=body, path=path, key=KEY if path == PATH else ADMIN.encode()
    )
    assert (got, why in error["message"]) == (code, True), error


@pytest.mark.parametrize(
    ("coding", "body"),
    [(b"gzip", PACKED), (b"GZIP", PACKED), (b"deflate", zlib.compress(BODY)), (b"identity", BODY)],
    ids=["gzip", "GZIP", "deflate", "identity"],
)
async def test_a_packed_body_is_served(rig: Rig, coding: bytes, body: bytes) -> None:
    assert (await send(rig, headers=b"Content-Encoding: " + coding + b"\r\n", body=body))[0] == 200


@pytest.mark.parametrize(
    "given",
    [b"a\x01", b"a\x00", b"a\xe9", b"a\xc3\xa9", b"a" * 201, b"a" * 9000],
    ids=["control", "nul", "latin", "utf-8", "long", "endless"],
)
async def test_a_bad_request_id_is_an_openai_error(rig: Rig, given: bytes) -> None:
    code, _ = await send(rig, headers=b"x-request-id: " + given + b"\r\n")
    assert code == 400
    assert rig.engine.requests == []


async def test_s5_a_long_request_id_is_never_cut_to_that_of_another_request(rig: Rig) -> None:
    assert (await rig.chat([USER], request_id="a" * 200))[0] == 200
    code, body = await rig.chat([USER, USER], request_id="a" * 201)
    assert (code, body["error"]["code"]) == (400, "invalid_request_id")


@pytest.mark.parametrize(
    "headers", [b"Expect: miracles\r\n", b"Transfer-Encoding: chunked\r\n", b"x: \x01\r\n", b"no colon\r\n", b"Content-Length: x\r\n"]
)
async def test_what_http_refuses_is_an_openai_error_too(rig: Rig, headers: bytes) -> None:
    code, error = await send(rig, headers=headers)
    assert 400 <= code < 500
    assert error


@pytest.mark.parametrize("method", ["FOO", "PUT", "\x16\x03"])
async def test_an_unknown_method_is_an_openai_error(rig: Rig, method: str) -> None:
    code, error = await send(rig, method=method)
    assert code in (400, 405)
    assert error


@pytest.mark.parametrize("session", ["t٣-g004-a1.1", "t3-g٤-a1.1", "t3-g004-a1.१", "t３-g004-a1.1", "t3-g004-a1.1\n"])
def test_a_session_id_has_ascii_digits(session: str) -> None:
    assert parse_session(session) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (rb'{"a": "\ud800"}', r"lone surrogate \ud800 at byte 7"),
        (rb'{"a": "\uD83D\u0041 and more"}', r"lone surrogate \uD83D at byte 7"),
        (rb'{"a": "\uD83D\\uDE00 and more"}', r"lone surrogate \uD83D at byte 7"),
        (rb'{"a": "\ud83d\ude00 \udc00 more"}', r"lone surrogate \udc00 at byte 20"),
        (b'{"a": "\xed\xa0\x80"}', "invalid UTF-8 at byte 7"),
        (b'{"a": "\xff"}', "invalid UTF-8 at byte 7"),
        (b'{"a": "x', "truncated"),
        (rb'{"a": "\\ud800', "truncated"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_text_that_is_no_json_is_called_what_it_is(text: bytes, why: str) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)) as e:
        msgspec.json.decode(text)
    assert why in reason(text, e.value)


@pytest.mark.parametrize("field", ["content", "name"])
async def test_a_lone_surrogate_is_named_wherever_it_stands(rig: Rig, field: str) -> None:
    lone = rb'{"messages": [{"role": "user", "%s": "\ud800", "content": "x"}]}' % field.encode()
    code, body = await rig.post(lone)
    if field == "content":
        assert (code, "lone surrogate" in body["error"]["message"]) == (400, True)
    code, body = await rig.post(b'{"messages": [{"role": "user", "content": "\xff"}]}')
    assert (code, "invalid UTF-8 at byte" in body["error"]["message"]) == (400, True)
    with pytest.raises(ValueError, match="lone surrogate"):
        parse_object(r'{"a": "\ud800"}')


async def test_a_conversation_that_the_policys_template_refuses_is_a_422(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl360.sessions.templates import ChatML

    def refuse(*_: object) -> list[int]:
        raise TemplateError("roles must alternate")

    monkeypatch.setattr(ChatML, "render", refuse)
    code, body = await rig.chat([USER, USER])
    assert (code, body["error"]["param"], "roles must alternate" in body["error"]["message"]) == (422, "messages", True)


# ---------------------------------------------------------------------------------------------------- always


_scalars = st.none() | st.booleans() | st.integers() | st.sampled_from([2**64, -(10**40), 1e300, 0.0, 1.5]) | st.text(max_size=6)
_json = st.recursive(
    _scalars,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "name", "a", ""]), x, max_size=3),
    max_leaves=6,
)


def _often(usual: Any) -> Any:
    return st.integers(0, 15).flatmap(lambda n: usual if n else _json)


def _some(needed: dict[str, Any], more: dict[str, Any]) -> Any:
    return st.fixed_dictionaries({k: _often(v) for k, v in needed.items()}, optional={k: _often(v) for k, v in more.items()})


_part = _some({"type": st.sampled_from(["text", "refusal", "image_url"])}, {"text": st.text(max_size=4), "refusal": st.text(max_size=4)})
_text = st.text(max_size=8) | st.lists(_part, max_size=2)
_arguments = st.dictionaries(st.text(max_size=3), _json, max_size=2)
_called = _some({"name": st.sampled_from(["bash", "f"])}, {"arguments": _arguments | _arguments.map(json.dumps) | st.text(max_size=5)})
_message = _some(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": _text},
    {"tool_calls": st.lists(_some({"function": _called}, {"id": st.text(max_size=3)}), max_size=2), "tool_call_id": st.text(max_size=3)},
)
_schema = _some({}, {"type": st.just("object"), "properties": _arguments, "required": st.lists(st.text(max_size=3), max_size=2)})
_function = _some({"name": st.sampled_from(["bash", "f"])}, {"description": st.text(max_size=5), "parameters": _schema})
_tools = st.lists(_some({"type": st.just("function"), "function": _function}, {}), max_size=2)
_body = _some(
    {"messages": st.lists(_message, min_size=1, max_size=3).map(lambda m: [*m, USER])},
    {
        "tools": _tools,
        "stream": st.booleans(),
        "n": st.just(1),
        "stop": st.just([]),
        "stream_options": st.just({"include_usage": True}),
        "temperature": st.floats(0, 2),
        "logprobs": st.just(False),
    },
)


async def test_always_a_body_of_roughly_the_right_shape_is_served_or_refused_never_a_500(make_rig: Any) -> None:
    rig = await make_rig(sessions=Sessions(max_body_mb=1))
    await rig.open()
    bodies: list[bytes] = []
    given(_body | _json)(settings(max_examples=80, deadline=None, database=None)(lambda b: bodies.append(json.dumps(b).encode())))()
    codes: dict[int, int] = {}
    for data in bodies:
        rig.engine.script = ['<tool_call>\n{"name": "bash", "arguments": {"command": 1e30}}\n</tool_call>']
        code, error = await send(rig, body=data) if b'"stream": true' not in data else (await _status(rig, data), {})
        assert code < 500, (code, data, error)
        codes[code] = codes.get(code, 0) + 1
    assert codes[200] > 3
    assert codes[400] > 10


async def _status(rig: Rig, data: bytes) -> int:
    async with rig.http.post(f"{rig.url}{PATH}", data=data, headers={"Authorization": f"Bearer {KEY.decode()}"}) as r:
        await r.read()
        return r.status
