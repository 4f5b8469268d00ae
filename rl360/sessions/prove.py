"""The proof that a chat template only appends (S2), run before a session server serves it.

Over a generated corpus, for every point where the policy may be called:
    rendering k messages is a token prefix of rendering k + 1;
    the generation prompt and a reply continue it, and the reply ends with a stop token;
    the suffix of later messages, rendered alone, is what rendering everything appends;
    special-token text inside content makes no special token.
A point inside a run of tool results is not one: parallel results arrive together and are rendered as one (CASES 17).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Final

from rl360.sessions.jinja import JinjaTemplate, own_template
from rl360.sessions.messages import Message, Tool, ToolCall
from rl360.sessions.templates import Template, get_template
from rl360.sessions.tokenizer import TemplateError, Tokenizer

HINT: Final = 'use a fixed template (sessions.template = "qwen3" for Qwen3 policies, or "k2v3")'
_TEXTS: Final = ("", "hi", "\n", " lead and trail \n", "naïve 中文 🙂 é", "a\n\nb", '{"x": [1, 2]}', "</think>", "<think>x</think>y")
_TOOLS: Final = (
    Tool(name="bash", description="run a command", parameters={"type": "object", "properties": {"command": {"type": "string"}}}),
    Tool(name="edit", parameters={"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}),
)


def prove_append_only(template: Template, *, conversations: int = 32, seed: int = 0) -> None:
    """Raise TemplateError naming the first message and token where `template` does something else than append."""
    rng = random.Random(seed)
    lookalikes = tuple(template.tokenizer.specials)
    for number in range(conversations):
        messages = list(_conversation(rng, (*_TEXTS, *lookalikes, f"a{''.join(lookalikes)}b")))
        tools = _TOOLS[: number % 3]
        _appends(template, messages, tools, number)
        _keeps_text_plain(template, messages, tools, number)


def _appends(template: Template, messages: Sequence[Message], tools: Sequence[Tool], number: int) -> None:
    cuts = [k for k in range(1, len(messages) + 1) if k == len(messages) or messages[k].role != "tool" or messages[k - 1].role != "tool"]
    renders = {k: template.render(messages[:k], tools) for k in cuts}
    for k, after in itertools.pairwise(cuts):
        what = f"{_place(messages, number, after)}: what stood before it renders differently"
        _same(template, renders[k], renders[after][: len(renders[k])], what)
    for k, after in itertools.pairwise(cuts):
        where = _place(messages, number, after)
        if messages[k].role == "assistant":
            _samples(template, renders[k], renders[after], messages[k], where)
        if messages[k - 1].role == "assistant":
            _continues(template, renders, messages, k, where)


def _place(messages: Sequence[Message], number: int, k: int) -> str:
    return f"conversation {number}, message {k} ({messages[k - 1].role})"


def _samples(template: Template, before: list[int], whole: list[int], reply: Message, where: str) -> None:
    if whole[-1] not in template.stop_token_ids:
        raise _broken(
            template, f"{where}: token {len(whole) - 1}, {_spell(template, whole[-1:])}, comes after the stop token, never sampled"
        )
    prompt = before + template.generation_prompt
    _same(template, prompt, whole[: len(prompt)], f"{where}: it doesn't follow the generation prompt")
    _same(template, template.reply_ids(reply), whole[len(prompt) :], f"{where}: it isn't what the policy would sample")


def _continues(template: Template, renders: dict[int, list[int]], messages: Sequence[Message], k: int, where: str) -> None:
    for end in itertools.islice((e for e in renders if e > k), 3):
        _same(template, renders[k] + template.suffix(messages[k:end]), renders[end], f"{where}: rendered alone, what follows it differs")


def _keeps_text_plain(template: Template, messages: Sequence[Message], tools: Sequence[Tool], number: int) -> None:
    specials = _specials(template, messages, tools)
    for k, message in enumerate(messages):
        if not any(s in message.content for s in template.tokenizer.specials):
            continue
        harmless = Message(role=message.role, content="x", tool_calls=message.tool_calls, tool_call_id="c")
        swapped = [*messages[:k], harmless, *messages[k + 1 :]]
        if specials != _specials(template, swapped, tools):
            raise _broken(template, f"{_place(messages, number, k + 1)}: special-token text in it becomes a special token")


def _specials(template: Template, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
    return [i for i in template.render(messages, tools) if i in template.tokenizer.special_ids]


def _same(template: Template, a: list[int], b: list[int], what: str) -> None:
    if a == b:
        return
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    raise _broken(template, f"{what}: token {at} is {_spell(template, b[at : at + 1])}, expected {_spell(template, a[at : at + 1])}")


def _spell(template: Template, ids: list[int]) -> str:
    return repr(template.tokenizer.decode(ids)) if ids else "nothing"


def _broken(template: Template, what: str) -> TemplateError:
    return TemplateError(f"chat template {template.name!r} is not append-only (S2): {what}; {HINT}")


def _conversation(rng: random.Random, texts: Sequence[str]) -> Iterator[Message]:
    """System or not, user, then assistant turns with text, calls, parallel results; ends anywhere."""
    if rng.random() < 0.6:
        yield Message(role="system", content=rng.choice(texts))
    yield Message(role="user", content=rng.choice(texts))
    for turn in range(rng.randint(1, 5)):
        calls = tuple(_call(rng, texts, f"call_{turn}_{i}") for i in range(rng.choice((0, 0, 1, 1, 2, 3))))
        yield Message(role="assistant", content=rng.choice(texts), tool_calls=calls)
        for call in calls:
            yield Message(role="tool", content=rng.choice(texts), tool_call_id=call.id)
        if not calls or rng.random() < 0.2:
            yield Message(role="user", content=rng.choice(texts))


def _call(rng: random.Random, texts: Sequence[str], id_: str) -> ToolCall:
    if rng.random() < 0.7:
        return ToolCall(name="bash", arguments={"command": rng.choice(texts)}, id=id_)
    return ToolCall(name="edit", arguments={"path": rng.choice(texts), "text": rng.choice(texts)}, id=id_)


def admit(name: str, tokenizer: Tokenizer) -> Template:
    """The template called `name` in a recipe (`jinja`: the policy's own), proven. Raises TemplateError."""
    template = JinjaTemplate(own_template(tokenizer.folder), tokenizer) if name == "jinja" else get_template(name, tokenizer)
    prove_append_only(template)
    return template
