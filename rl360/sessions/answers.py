"""What the agent gets: OpenAI's replies and errors, as bytes. No token id and no routing byte is in them (S3)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from rl360.sessions.messages import ToolCall
from rl360.sessions.turns import Turn

MODEL: Final = "policy"
DONE: Final = b"data: [DONE]\n\n"


def completion(session: str, turn: Turn) -> bytes:
    """Body of a plain reply. It follows from the turn alone, so a retry gets the same bytes (S5)."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(turn), "refusal": None}
    if turn.reply.tool_calls:
        message["tool_calls"] = [_call(turn, i, c) for i, c in enumerate(turn.reply.tool_calls)]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(turn)}
    return msgspec.json.encode({**_head(session, turn, "chat.completion"), "choices": [choice], "usage": _usage(turn)})


def stream(session: str, turn: Turn, *, include_usage: bool) -> Iterator[bytes]:
    """Server-sent events of the same reply: role, text, one event a tool call, the reason, `[DONE]`."""
    yield _chunk(session, turn, {"role": "assistant", "content": ""})
    if turn.reply.content:
        yield _chunk(session, turn, {"content": turn.reply.content})
    for i, call in enumerate(turn.reply.tool_calls):
        yield _chunk(session, turn, {"tool_calls": [{"index": i, **_call(turn, i, call)}]})
    yield _chunk(session, turn, {}, finish=_finish(turn))
    if include_usage:
        yield _event({**_head(session, turn, "chat.completion.chunk"), "choices": [], "usage": _usage(turn)})
    yield DONE


def error(status: int, code: str, message: str, *, param: str = "", **more: str) -> bytes:
    """OpenAI's error body. `boundary`, `cause` and `exception` say what a runner needs to classify it (S13)."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param or None, "code": code, **more}})


def models(created: int) -> bytes:
    return msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model", "created": created, "owned_by": "rl360"}]})


def _chunk(session: str, turn: Turn, delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return _event({**_head(session, turn, "chat.completion.chunk"), "choices": [choice]})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _head(session: str, turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{session}-{turn.number}", "object": kind, "created": int(turn.ended), "model": MODEL}


def _content(turn: Turn) -> str | None:
    return None if turn.reply.tool_calls and not turn.reply.content else turn.reply.content


def _call(turn: Turn, index: int, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{turn.number}_{index}", "type": "function", "function": function}


def _finish(turn: Turn) -> str:
    if turn.finish_reason == "length":
        return "length"
    return "tool_calls" if turn.reply.tool_calls else "stop"


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.output_tokens,
        "total_tokens": turn.prompt_tokens + turn.output_tokens,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }
