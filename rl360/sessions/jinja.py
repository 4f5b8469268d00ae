"""A policy's own chat template (Jinja, Hugging Face's dialect), for use behind `prove.prove_append_only`.

Special-token text inside content is swapped for a private-use mark before rendering and put back as plain text after it, so that
only the template's own special tokens become special ids (S2).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import jinja2
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl360.sessions.messages import Message, Tool
from rl360.sessions.replies import Reply, parse_ids
from rl360.sessions.tokenizer import TemplateError, Tokenizer

_OPEN: Final = "\ue000"
_CLOSE: Final = "\ue001"
_MARK: Final = re.compile(f"{_OPEN}([0-9a-f]+){_CLOSE}")
_BEFORE: Final = (Message(role="user", content="a"), Message(role="assistant", content="b"))


class JinjaTemplate:
    """`suffix` renders behind a short stand-in conversation; the proof shows that this is the same as behind the real one."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, name: str = "jinja") -> None:
        self.name: Final = name
        self.tokenizer: Final = tokenizer
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension])
        environment.filters["tojson"] = _tojson
        cast(dict[str, Any], environment.globals)["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise TemplateError(f"chat template {name!r}, line {e.lineno}: {e.message}") from None
        self._special = re.compile("|".join(re.escape(s) for s in sorted(tokenizer.specials, key=len, reverse=True)) or "(?!)")
        self._escape = re.compile(f"{self._special.pattern}|[{_OPEN}{_CLOSE}]")

    @property
    def generation_prompt(self) -> list[int]:
        return self._prompt

    @property
    def stop_token_ids(self) -> list[int]:
        return self._stop

    @cached_property
    def _prompt(self) -> list[int]:
        return self._after(self._ids(_BEFORE[:1], (), prompt=True), self.render(_BEFORE[:1]))

    @cached_property
    def _stop(self) -> list[int]:
        """The special token that ends the stand-in reply; the proof refuses a template that writes anything after it."""
        specials = [i for i in self._before if i in self.tokenizer.special_ids]
        if not specials:
            raise TemplateError(f"chat template {self.name!r} ends a reply with no special token: the policy can't say that it is done")
        return specials[-1:]

    @cached_property
    def _before(self) -> list[int]:
        return self.render(_BEFORE)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return self._ids(messages, tools, prompt=False)

    def suffix(self, messages: Sequence[Message]) -> list[int]:
        return self._after(self.render([*_BEFORE, *messages]), self._before)

    def reply_ids(self, message: Message) -> list[int]:
        return self._after(self.render([_BEFORE[0], message]), self.render(_BEFORE[:1]) + self.generation_prompt)

    def parse_reply(self, ids: Sequence[int], tools: Sequence[Tool] | None = None) -> Reply:
        return parse_ids(self.tokenizer, ids, tools)

    def _ids(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> list[int]:
        """Special tokens of the template's own text by id; the plain text between two of them is encoded as one."""
        marks: list[str] = []
        data = [self._escaped(_openai(m), marks) for m in messages]
        offered = [self._escaped(t.openai(), marks) for t in tools] or None
        try:
            text = self._template.render(messages=data, tools=offered, add_generation_prompt=prompt, bos_token="", eos_token="")
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as e:
            raise TemplateError(f"chat template {self.name!r} can't render {len(messages)} messages: {e}") from None
        ids: list[int] = []
        at = 0
        for match in self._special.finditer(text):
            ids += self.tokenizer.encode(_restored(text[at : match.start()], marks))
            ids.append(self.tokenizer.specials[match.group()])
            at = match.end()
        return ids + self.tokenizer.encode(_restored(text[at:], marks))

    def _escaped(self, value: Any, marks: list[str]) -> Any:
        """`value` with special-token text swapped for marks; what was swapped is appended to `marks`."""
        if isinstance(value, str):
            return self._escape.sub(lambda m: _mark(m.group(), marks), value)
        if isinstance(value, Mapping):
            pairs = cast(Mapping[Any, Any], value)
            return {self._escaped(k, marks): self._escaped(v, marks) for k, v in pairs.items()}
        if isinstance(value, list | tuple):
            return [self._escaped(v, marks) for v in cast(Sequence[Any], value)]
        return value

    def _after(self, ids: list[int], prefix: list[int]) -> list[int]:
        if ids[: len(prefix)] != prefix:
            raise TemplateError(
                f"chat template {self.name!r} is not append-only: an earlier message renders differently once another follows"
            )
        return ids[len(prefix) :]


def own_template(folder: Path) -> str:
    """Source of the chat template in a policy's folder. Raises TemplateError when there is none."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    try:
        data = cast(dict[str, Any], json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as e:
        raise TemplateError(f"{folder}: no chat_template.jinja and no readable tokenizer_config.json ({e})") from None
    source = data.get("chat_template")
    if not isinstance(source, str):
        raise TemplateError(f"{folder}/tokenizer_config.json: no chat_template in it; name a fixed template in sessions.template")
    return source


def _openai(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls
        ]
    if message.role == "tool":
        data["tool_call_id"] = message.tool_call_id
    return data


def _mark(text: str, marks: list[str]) -> str:
    marks.append(text)
    return f"{_OPEN}{len(marks) - 1:x}{_CLOSE}"


def _restored(text: str, marks: list[str]) -> str:
    return _MARK.sub(lambda m: marks[int(m.group(1), 16)], text)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
