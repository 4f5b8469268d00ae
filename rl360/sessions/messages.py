"""A conversation as templates and history see it: roles, flat text, tool calls with parsed arguments."""

from __future__ import annotations

from typing import Any, Final, Literal, cast

import msgspec

from rl360.sessions.unreadable import reason

DEPTH: Final = 64
"""Deepest nesting of a tool call's arguments, and of a tool's schema."""

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the parsed object; `id` ties a tool result to its call and never decides a match (S4)."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message. `developer` arrives as system, content parts as one text, `content: null` as ""."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is its JSON Schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the parameters, in the schema's order."""
        return tuple(self.parameters.get("properties") or ())

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(self.parameters.get("required") or ())

    def openai(self) -> dict[str, Any]:
        """The tool as OpenAI's request spells it."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": self.parameters}}


def parse_object(text: str) -> dict[str, Any]:
    """Arguments of a tool call. Raises ValueError for anything but one strict JSON object of bounded depth."""
    raw = text.encode(errors="surrogatepass")  # what is no UTF-8 is refused by the decoder
    try:
        value = cast(object, msgspec.json.decode(raw))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise ValueError(f"not JSON: {reason(raw, e)}") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    data = cast(dict[str, Any], value)
    if too_deep(data):
        raise ValueError(f"nested more than {DEPTH} deep")
    return data


def too_deep(value: dict[str, Any]) -> bool:
    """Whether JSON data is nested more than DEPTH deep. What passes can be encoded and walked without running out of stack."""
    level: list[Any] = [value]
    for _ in range(DEPTH):
        level = [x for v in level for x in _below(v)]
    return bool(level)


def _below(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast(dict[str, Any], value).values())
    return cast(list[Any], value) if isinstance(value, list) else []
