"""A conversation as templates and history see it: roles, flat text, tool calls with parsed arguments."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

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
