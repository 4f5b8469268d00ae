"""An agent's request body: read, validated, digested, before any state changes (S5). `fields.py` says which settings can be had.

Old messages cost a comparison of their bytes (`seen.py`): they are neither split nor parsed again.
"""

from __future__ import annotations

from typing import Any, Final, Literal, cast

import msgspec

from rl360.sessions import fields
from rl360.sessions.history import Digest, chained, digest, root
from rl360.sessions.messages import DEPTH, Message, Role, Tool, ToolCall, parse_object, too_deep
from rl360.sessions.seen import Seen, Unread, split
from rl360.sessions.unreadable import reason


class RequestError(Exception):
    """A request that can't be served: HTTP status and OpenAI's error fields."""

    def __init__(self, status: int, code: str, message: str, param: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Body(fields.Settings, kw_only=True):
    """The fields of a chat completion request that mean something here; messages and tools still raw."""

    messages: list[msgspec.Raw]
    tools: msgspec.Raw = fields.NULL
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _ToolFunction


class Incoming(msgspec.Struct, frozen=True):
    """A validated request. `chain` and `roles` as `history.match` takes them; `raw` as `Seen` holds it."""

    raw: list[bytes]
    chain: list[Digest]
    roles: list[Role]
    tools: tuple[Tool, ...]
    stream: bool
    include_usage: bool

    def messages(self, start: int) -> list[Message]:
        """Messages from `start` on, parsed."""
        return _parsed(self.raw, start)


_ROLES: Final[dict[str, Role]] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MEDIA: Final = ("image", "audio", "video", "file")
_body: Final = msgspec.json.Decoder(Body)
_message: Final = msgspec.json.Decoder(_Message)
_tools: Final = msgspec.json.Decoder(list[_Tool])


def read(body: Unread, seen: Seen) -> Incoming:
    """Validate a body. Raises RequestError: 400 with the place and the reason, 422 for content the policy can't read."""
    asked, body = _decode(body)
    for name, why in fields.refused(asked):
        raise RequestError(400, "unsupported_parameter", why, name)
    if not asked.messages:
        raise RequestError(400, "invalid_request", "messages is empty: send the conversation so far", "messages")
    seen = _follow(asked, body, seen)
    if seen.roles[-1] == "assistant":
        raise RequestError(400, "invalid_request", "the last message is the assistant's: there is nothing to answer", "messages")
    usage = bool(asked.stream_options and asked.stream_options.include_usage)
    return Incoming(seen.raw, seen.chain, seen.roles, seen.tools, bool(asked.stream), usage)


def _decode(body: Unread) -> tuple[Body, Unread]:
    """The fields of a body. One that doesn't make sense without its known messages is read whole."""
    try:
        asked = _body.decode(body.text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        if body.known:
            return _decode(body.whole())
        code = "invalid_request" if isinstance(e, msgspec.ValidationError) else "invalid_json"
        raise RequestError(400, code, f"request body: {reason(body.data, e)}") from None
    return (asked, body) if body.holds(asked.messages) else _decode(body.whole())


def _follow(asked: Body, body: Unread, seen: Seen) -> Seen:
    """Make `seen` the request in `body`. Messages that stand where they stood before keep their meaning without being read."""
    head, raw = split(body, asked.messages, seen)
    tools_raw, same = bytes(asked.tools), body.known
    if tools_raw == seen.tools_raw:
        tools = seen.tools
        while same < min(len(raw), len(seen.raw)) and raw[same] == seen.raw[same]:
            same += 1
    else:
        tools, same = parse_tools(tools_raw), 0
    new = _parsed(raw, same)
    start = seen.chain[: same + 1] if same else [root(tools)]
    seen.chain = start[:-1] + chained(start[-1], (digest(m) for m in new))
    seen.roles = seen.roles[:same] + [m.role for m in new]
    seen.head, seen.raw, seen.tools_raw, seen.tools = head, raw, tools_raw, tools
    return seen


def _parsed(raw: list[bytes], start: int) -> list[Message]:
    return [parse_message(m.lstrip(b", \t\r\n"), i) for i, m in enumerate(raw[start:], start)]


def parse_tools(data: bytes) -> tuple[Tool, ...]:
    """Tools of a request (`null`: none). Raises RequestError."""
    if data == b"null":
        return ()
    try:
        tools = _tools.decode(data)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise RequestError(400, "invalid_request", f"tools: {reason(data, e)}", "tools") from None
    return tuple(_tool(t.function, f"tools[{i}].function.parameters") for i, t in enumerate(tools))


def _tool(function: _ToolFunction, where: str) -> Tool:
    """A tool whose schema can be read, written and digested, however it came."""
    schema = function.parameters or {}
    wrong = _wrong_schema(schema)
    if wrong:
        raise RequestError(400, "invalid_request", f"{where}: {wrong}", where)
    return Tool(name=function.name, description=function.description or "", parameters=schema)


def _wrong_schema(schema: dict[str, Any]) -> str:
    if too_deep(schema):
        return f"nested more than {DEPTH} deep"
    properties, required = schema.get("properties"), cast(object, schema.get("required"))
    if properties and not isinstance(properties, dict):
        return "properties must be an object"
    if required and not (isinstance(required, list) and all(isinstance(x, str) for x in cast(list[object], required))):
        return "required must be a list of names"
    return ""


def parse_message(raw: bytes, index: int) -> Message:
    """Message `index` of a request. Raises RequestError."""
    where = f"messages[{index}]"
    try:
        m = _message.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise RequestError(400, "invalid_request", f"{where}: {reason(raw, e)}", where) from None
    role = _ROLES.get(m.role)
    if role is None:
        raise RequestError(400, "invalid_request", f"{where}: unknown role {m.role!r} (use {', '.join(_ROLES)})", f"{where}.role")
    if m.content is None and role != "assistant":
        raise RequestError(400, "invalid_request", f"{where}: a {m.role} message needs content", f"{where}.content")
    calls = tuple(_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(m.tool_calls or ())) if role == "assistant" else ()
    return Message(role=role, content=_flat(m.content, where), tool_calls=calls, tool_call_id=m.tool_call_id or "")


def _flat(content: str | list[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for i, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise _bad_part(part, f"{where}.content[{i}]")
        texts.append(text)
    return "".join(texts)


def _bad_part(part: _Part, where: str) -> RequestError:
    if any(kind in part.type for kind in _MEDIA):
        return RequestError(422, "unsupported_content", f"{where}: {part.type!r} can't be used: this policy reads text only", where)
    return RequestError(400, "invalid_request", f"{where}: a part of type {part.type!r} without text can't be used", where)


def _call(call: _Call, where: str) -> ToolCall:
    arguments = call.function.arguments
    try:
        parsed = _arguments(arguments)
    except ValueError as e:
        raise RequestError(400, "invalid_request", f"{where}.function.arguments: {e}", where) from None
    return ToolCall(name=call.function.name, arguments=parsed, id=call.id or "")


def _arguments(given: str | dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError."""
    if isinstance(given, str):
        return parse_object(given) if given.strip() else {}
    if too_deep(given):
        raise ValueError(f"nested more than {DEPTH} deep")
    return given
