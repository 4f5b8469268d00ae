"""What an agent may set in a chat completion, and what comes of it: the one place where each field of OpenAI's request is decided (S3).

The sampling is the run's. A field that would make the policy say something else than it samples, or that promises what this server
doesn't do, is refused unless it says what holds anyway. Fields that aren't here are unknown and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, cast

import msgspec

Kind = Literal["honoured", "run", "harmless", "refused"]
"""honoured: means what OpenAI says. run: ignored, the recipe's value holds. harmless: ignored, changes no token. refused: 400."""

NULL: Final = msgspec.Raw(b"null")


class Field(NamedTuple):
    """`why` it is so. `allowed`: values of a refused field that say what holds anyway, beside `null`."""

    kind: Kind
    why: str
    allowed: tuple[object, ...] = ()


_CONSTRAINS: Final = "it would bend what is sampled away from the policy that is trained"
_RECIPE: Final = "sampling.{} of the recipe holds"
_TEXT_ONLY: Final = "this policy reads and writes text only"
_NO_PLACE: Final = "the policy's chat template has no place for it"
_ACCOUNTING: Final = "accounting of OpenAI's own service"

FIELDS: Final[dict[str, Field]] = {
    "messages": Field("honoured", "the conversation so far"),
    "tools": Field("honoured", "functions, rendered by the policy's chat template"),
    "stream": Field("honoured", "the same reply as server-sent events, once it is whole"),
    "stream_options": Field("honoured", "include_usage"),
    "temperature": Field("run", _RECIPE.format("temperature")),
    "top_p": Field("run", "always 1: log-probs are of the whole distribution"),
    "max_tokens": Field("run", _RECIPE.format("max_new_tokens")),
    "max_completion_tokens": Field("run", _RECIPE.format("max_new_tokens")),
    "seed": Field("run", "samples of a group must differ"),
    "model": Field("harmless", "a session has one policy"),
    "user": Field("harmless", _ACCOUNTING),
    "safety_identifier": Field("harmless", _ACCOUNTING),
    "metadata": Field("harmless", _ACCOUNTING),
    "store": Field("harmless", "the journal keeps every turn"),
    "service_tier": Field("harmless", _ACCOUNTING),
    "prediction": Field("harmless", "a hint for speed"),
    "prompt_cache_key": Field("harmless", "a session stays on the engine that holds its cache"),
    "prompt_cache_options": Field("harmless", "a hint for speed"),
    "prompt_cache_retention": Field("harmless", "a hint for speed"),
    "n": Field("refused", "a turn has one reply; open one session for each sample", (1,)),
    "stop": Field("refused", "a reply ends where the policy ends it; cut its text on your side", ([],)),
    "logit_bias": Field("refused", _CONSTRAINS, ({},)),
    "frequency_penalty": Field("refused", _CONSTRAINS, (0,)),
    "presence_penalty": Field("refused", _CONSTRAINS, (0,)),
    "response_format": Field("refused", f"{_CONSTRAINS}; ask for the format in a message", ({"type": "text"},)),
    "tool_choice": Field("refused", f"{_CONSTRAINS}; ask for the tool in a message, or send no tools", ("auto",)),
    "parallel_tool_calls": Field("refused", f"{_CONSTRAINS}; take the first call of a reply on your side", (True,)),
    "logprobs": Field("refused", "an agent sees no token; the journal has the log-probs", (False,)),
    "top_logprobs": Field("refused", "an agent sees no token; the journal has the log-probs", (0,)),
    "functions": Field("refused", "send them as tools", ([],)),
    "function_call": Field("refused", "send tools, and let the policy choose", ("auto",)),
    "modalities": Field("refused", _TEXT_ONLY, (["text"],)),
    "audio": Field("refused", _TEXT_ONLY),
    "reasoning_effort": Field("refused", _NO_PLACE),
    "verbosity": Field("refused", _NO_PLACE),
    "web_search_options": Field("refused", "there is no search here; give the agent a tool for it"),
    "moderation": Field("refused", "nothing is moderated here"),
}


class Settings(msgspec.Struct, kw_only=True):
    """The refused fields as they came; every one of them must be in FIELDS."""

    n: msgspec.Raw = NULL
    stop: msgspec.Raw = NULL
    logit_bias: msgspec.Raw = NULL
    frequency_penalty: msgspec.Raw = NULL
    presence_penalty: msgspec.Raw = NULL
    response_format: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    parallel_tool_calls: msgspec.Raw = NULL
    logprobs: msgspec.Raw = NULL
    top_logprobs: msgspec.Raw = NULL
    functions: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    modalities: msgspec.Raw = NULL
    audio: msgspec.Raw = NULL
    reasoning_effort: msgspec.Raw = NULL
    verbosity: msgspec.Raw = NULL
    web_search_options: msgspec.Raw = NULL
    moderation: msgspec.Raw = NULL


def refused(settings: Settings) -> Iterator[tuple[str, str]]:
    """Fields that can't be had, each with the reason and what may be sent instead."""
    for name in Settings.__struct_fields__:
        raw = cast(msgspec.Raw, getattr(settings, name))
        if raw is not NULL and bytes(raw) != b"null" and not _allowed(bytes(raw), FIELDS[name].allowed):
            yield name, _reason(name, bytes(raw), FIELDS[name])


def _allowed(raw: bytes, values: tuple[object, ...]) -> bool:
    """Numbers are compared as numbers (0.0 is 0), and never with true or false."""
    try:
        given = cast(object, msgspec.json.decode(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return any(given == v and isinstance(given, bool) == isinstance(v, bool) for v in values)


def _reason(name: str, raw: bytes, field: Field) -> str:
    given = raw[:60].decode(errors="replace") + ("..." if len(raw) > 60 else "")
    allowed = " or ".join(msgspec.json.encode(v).decode() for v in field.allowed)
    remedy = f"leave it out or send {allowed}" if allowed else "leave it out"
    return f"{name} = {given} can't be had: {field.why} ({remedy})"
