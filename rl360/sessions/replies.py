"""A sampled reply read as OpenAI's message: text, tool calls, or a format error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from rl360.sessions.messages import Tool, ToolCall, parse_object
from rl360.sessions.tokenizer import Tokenizer

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_TAG: Final = re.compile("(</?tool_call>)")


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent gets. With `format_error` (why it did not parse) the whole reply stands in `content`, and no call."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    format_error: str = ""


def parse_ids(tokenizer: Tokenizer, ids: Sequence[int], tools: Sequence[Tool] | None = None) -> Reply:
    """Read sampled ids. A trailing special token (the one that stopped it) belongs to the frame, not to the text.

    Tags are tags only as special tokens: one that the model spelled out letter by letter is text (S2), and an attempt to call.
    """
    tags = {tokenizer.specials[t]: t for t in (OPEN, CLOSE) if t in tokenizer.specials}
    stopped = len(ids) > 0 and ids[-1] in tokenizer.special_ids and ids[-1] not in tags
    body = list(ids[:-1] if stopped else ids)
    if not tags:
        return parse_text(tokenizer.decode(body), tools)
    parts: list[str] = []
    start = 0
    for i, id_ in enumerate(body):
        if id_ in tags:
            parts += [tokenizer.decode(body[start:i]), tags[id_]]
            start = i + 1
    parts.append(tokenizer.decode(body[start:]))
    return _read(parts, tools)


def parse_text(text: str, tools: Sequence[Tool] | None = None) -> Reply:
    """Read a reply from text whose tags are meant as tags."""
    return _read(_TAG.split(text), tools)


def _read(parts: list[str], tools: Sequence[Tool] | None) -> Reply:
    """`parts`: text, tag, text, tag, ... text."""
    whole = "".join(parts)
    if len(parts) == 1:
        tried = "tool_call>" in whole or whole.lstrip().startswith("{")
        return Reply(content=whole, format_error="a tool call needs its tags" if tried else "")
    calls: list[ToolCall] = []
    rest = parts[1:]
    while rest:
        error = _call(rest, calls, tools)
        if error:
            return Reply(content=whole, format_error=error)
        rest = rest[4:]
    # The newline between text and call is the frame's, as `templates.call_text` writes it.
    return Reply(content=parts[0].removesuffix("\n"), tool_calls=tuple(calls))


def _call(rest: list[str], calls: list[ToolCall], tools: Sequence[Tool] | None) -> str:
    """Read one `<tool_call> body </tool_call> after` from the head of `rest`; returns why it can't be."""
    if len(rest) < 4 or rest[0] != OPEN or rest[2] != CLOSE:
        return "tool call tags don't pair up"
    if rest[3].strip():
        return "text after a tool call"
    try:
        call = parse_object(rest[1])
    except ValueError as e:
        return f"tool call: {e}"
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return 'tool call needs "name" (text) and "arguments" (object)'
    args = cast(dict[str, Any], arguments)
    error = _misfit(name, args, tools)
    if not error:
        calls.append(ToolCall(name=name, arguments=args))
    return error


def _misfit(name: str, arguments: dict[str, Any], tools: Sequence[Tool] | None) -> str:
    """Why a call fits none of the offered tools (None: not checked)."""
    if tools is None:
        return ""
    tool = next((t for t in tools if t.name == name), None)
    if tool is None:
        return f"unknown tool {name!r}"
    missing = [r for r in tool.required if r not in arguments]
    return f"{name} lacks {', '.join(missing)}" if missing else ""
