"""Chat templates that only append (S2), and the way a session uses one.

A session never renders an old message again: its first prompt is `render(messages, tools)`, each later one the stored ids plus
`suffix(new messages)`, both followed by `generation_prompt`. `k2v3` and `qwen3` are fixed; `jinja` is the policy's own template,
admitted only after `prove.prove_append_only`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from rl360.sessions.messages import Message, Tool, ToolCall
from rl360.sessions.replies import CLOSE, OPEN, Reply, parse_ids
from rl360.sessions.tokenizer import TemplateError, Tokenizer, load_tokenizer

__all__ = ["ChatML", "Message", "Reply", "Template", "TemplateError", "Tokenizer", "Tool", "ToolCall", "get_template", "load_tokenizer"]

Part = int | str
Parts = list[Part]


class Template(Protocol):
    """How one policy's conversations become token ids."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def generation_prompt(self) -> list[int]:
        """Ids after which the policy samples its reply."""
        ...

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a reply; the sampled one stays in the stored tokens."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a whole conversation, no generation prompt. The last message's end token is the last id."""
        ...

    def suffix(self, messages: Sequence[Message]) -> list[int]:
        """Ids of messages appended after an assistant's reply, the boundary rule included; no generation prompt."""
        ...

    def reply_ids(self, message: Message) -> list[int]:
        """Ids that the policy would have sampled to say an assistant `message`, the stop token included."""
        ...

    def parse_reply(self, ids: Sequence[int], tools: Sequence[Tool] | None = None) -> Reply:
        """Read sampled ids as a message; calls are checked against `tools` when given."""
        ...


def call_text(call: ToolCall) -> str:
    """The JSON of a tool call, as the policy writes it."""
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


class ChatML:
    """`<|im_start|>role\\n ... <|im_end|>` with tool calls as tagged JSON.

    `boundary` is what stands between one message's end and the next one's start. The policy never samples it, so it belongs to
    the head of what is appended, never to the tail of what is stored. `group_tools`: tool results that follow each other form
    one user message (CASES 17), else each is a message of role tool.
    """

    def __init__(
        self, name: str, tokenizer: Tokenizer, *, boundary: str, group_tools: bool, head: Callable[[str, Sequence[Tool]], str]
    ) -> None:
        self.name: Final = name
        self.tokenizer: Final = tokenizer
        self._boundary = boundary
        self._group_tools = group_tools
        self._head = head
        self._start, self._end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
        self._open, self._close = tokenizer.special(OPEN), tokenizer.special(CLOSE)
        self.generation_prompt: Final = tokenizer.pieces([boundary, self._start, "assistant\n"])
        self.stop_token_ids: Final = [self._end]

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        system = messages[0].content if messages and messages[0].role == "system" else ""
        has_head = bool(tools) or bool(messages and messages[0].role == "system")
        rest = messages[1:] if messages and messages[0].role == "system" else messages
        parts: Parts = [self._start, f"system\n{self._head(system, tools)}", self._end] if has_head else []
        return self.tokenizer.pieces(parts + self._parts(rest, first=not has_head))

    def suffix(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.pieces(self._parts(messages, first=False))

    def reply_ids(self, message: Message) -> list[int]:
        return self.tokenizer.pieces(self._reply(message))

    def parse_reply(self, ids: Sequence[int], tools: Sequence[Tool] | None = None) -> Reply:
        return parse_ids(self.tokenizer, ids, tools)

    def _parts(self, messages: Sequence[Message], *, first: bool) -> Parts:
        parts: Parts = []
        i = 0
        while i < len(messages):
            if parts or not first:
                parts.append(self._boundary)
            run = _tool_run(messages, i) if self._group_tools else 0
            parts.append(self._start)
            parts += self._results(messages[i : i + run]) if run else self._message(messages[i])
            i += run or 1
        return parts

    def _message(self, message: Message) -> Parts:
        if message.role == "assistant":
            return ["assistant\n", *self._reply(message)]
        return [f"{message.role}\n{message.content}", self._end]

    def _results(self, messages: Sequence[Message]) -> Parts:
        text = "\n".join(f"<tool_response>\n{m.content}\n</tool_response>" for m in messages)
        return [f"user\n{text}", self._end]

    def _reply(self, message: Message) -> Parts:
        parts: Parts = [message.content + ("\n" if message.content and message.tool_calls else "")]
        for i, call in enumerate(message.tool_calls):
            parts += ["\n"] if i else []
            parts += [self._open, f"\n{call_text(call)}\n", self._close]
        return [*parts, self._end]


def _tool_run(messages: Sequence[Message], start: int) -> int:
    """How many tool results stand at `start`, one after the other."""
    end = start
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    return end - start


def _compact_head(system: str, tools: Sequence[Tool]) -> str:
    """System text with the line `Tools: bash(command), edit(path, text)`."""
    signatures = ", ".join(f"{t.name}({', '.join(t.arguments)})" for t in tools)
    return "\n".join(x for x in (system, f"Tools: {signatures}" if tools else "") if x)


def _json_head(system: str, tools: Sequence[Tool]) -> str:
    """System text with the whole JSON of every tool and how to call one."""
    if not tools:
        return system
    listing = "\n".join(json.dumps(t.openai(), ensure_ascii=False) for t in tools)
    how = f'Call a tool by writing {OPEN}\n{{"name": <its name>, "arguments": <a JSON object>}}\n{CLOSE}'
    return "\n\n".join(x for x in (system, f"# Tools\n<tools>\n{listing}\n</tools>\n{how}") if x)


def k2v3(tokenizer: Tokenizer) -> Template:
    """Nothing stands between `<|im_end|>` and the next `<|im_start|>`: the stored tokens are the canonical render."""
    return ChatML("k2v3", tokenizer, boundary="", group_tools=False, head=_compact_head)


def qwen3(tokenizer: Tokenizer) -> Template:
    """Qwen3's frame without its branches on the last message; the newline after `<|im_end|>` heads the next suffix."""
    return ChatML("qwen3", tokenizer, boundary="\n", group_tools=True, head=_json_head)


FIXED: Final[dict[str, Callable[[Tokenizer], Template]]] = {"k2v3": k2v3, "qwen3": qwen3}


def get_template(name: str, tokenizer: Tokenizer) -> Template:
    """A fixed template for a policy's tokenizer. Raises TemplateError for an unknown name or a missing special token."""
    if name not in FIXED:
        raise TemplateError(f"unknown chat template {name!r}: use {', '.join(FIXED)}, or jinja for the policy's own")
    return FIXED[name](tokenizer)
