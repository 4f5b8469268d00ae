"""What an engine's reply must be before it becomes a turn (S1). Pure.

The echoed prompt is nearly all of a reply, so it is compared with what was sent before the rest is parsed.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl360.bus.events import VersionSpan
from rl360.engines.contract import TORN, MetaInfo

_SPACE: Final = b" \t\r\n"


class Refused(Exception):
    """A reply that can't become a turn. `again`: a later try may do better."""

    def __init__(self, detail: str, *, again: bool = False) -> None:
        super().__init__(detail)
        self.again = again


_NULL: Final = msgspec.Raw(b"null")
_ECHO: Final = b'"prompt_token_ids":['
_EQUAL: Final = msgspec.Raw(b"[]")
"""In place of an echo that was found equal, known by its identity alone."""


class EngineReply(msgspec.Struct, frozen=True, kw_only=True):
    """A `/generate` reply; the echoed prompt stays raw."""

    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: msgspec.Raw = _NULL


_reply: Final = msgspec.json.Decoder(EngineReply)


def rest(content: bytes, prompt: bytes) -> bytes:
    """A reply without the ids of its echo, when these are the JSON ids `prompt` to the byte; else all of it."""
    start = content.find(_ECHO) + len(_ECHO)
    end = start + len(prompt)
    equal = start >= len(_ECHO) and content[end : end + 1] == b"]" and content.startswith(prompt, start)
    return content[:start] + content[end:] if equal else content


def parse(text: bytes, content: bytes) -> EngineReply:
    """A reply from its `rest`. Raises msgspec.MsgspecError, UnicodeDecodeError."""
    reply = _reply.decode(text)
    if len(text) == len(content):
        return reply
    if bytes(reply.prompt_token_ids) != b"[]":  # not the field whose ids were left out
        return _reply.decode(content)
    return msgspec.structs.replace(reply, prompt_token_ids=_EQUAL)


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A checked reply."""

    ids: list[int]
    logprobs: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    finish_reason: str  # stop | length


def check(reply: EngineReply, *, prompt: bytes, prompt_tokens: int, min_version: int) -> Sampled:
    """Check a reply to the prompt whose JSON ids are `prompt`. Raises Refused."""
    meta = reply.meta_info
    if meta.finish_reason.type == "abort":
        raise Refused(f"the engine aborted: {meta.finish_reason.message or 'no reason given'}", again=True)
    _check_echo(reply, prompt, prompt_tokens)
    rows = meta.output_token_logprobs
    if not reply.output_ids or [row[1] for row in rows] != reply.output_ids or meta.completion_tokens != len(reply.output_ids):
        raise Refused(
            f"{len(reply.output_ids)} output ids, {len(rows)} log-probs, {meta.completion_tokens} completion tokens: not the same"
        )
    if not all(math.isfinite(row[0]) for row in rows):
        raise Refused("a log-prob is not finite")
    spans = _spans(meta, len(rows))
    if min(s.version for s in spans) < min_version:
        raise Refused(f"sampled by version {spans[0].version}, this session needs {min_version} or later (S24)", again=True)
    logprobs = np.array([row[0] for row in rows], dtype="<f4")
    return Sampled(ids=reply.output_ids, logprobs=logprobs, spans=spans, finish_reason=meta.finish_reason.type)


def _check_echo(reply: EngineReply, prompt: bytes, prompt_tokens: int) -> None:
    """The engine must have seen exactly the stored ids."""
    echo = reply.prompt_token_ids
    if bytes(echo) == b"null":
        raise Refused("the reply has no prompt_token_ids: the engine must support return_prompt_token_ids (S1)")
    if echo is not _EQUAL and bytes(echo).translate(None, _SPACE) != b"[" + prompt + b"]":
        raise Refused("the engine's prompt ids are not the ones that were sent (S1)")
    if reply.meta_info.prompt_tokens != prompt_tokens:
        raise Refused(f"the engine counted {reply.meta_info.prompt_tokens} prompt tokens, {prompt_tokens} were sent (S1)")


def _spans(meta: MetaInfo, tokens: int) -> tuple[VersionSpan, ...]:
    """Versions of the output tokens; an engine that reports no spans has one version a reply."""
    if TORN in (meta.weight_version, *(s.version for s in meta.weight_versions)):
        raise Refused("sampled while an update was changing the weights", again=True)
    if not meta.weight_versions:
        return (VersionSpan(_version(meta.weight_version), 0, tokens),)
    spans = tuple(VersionSpan(_version(s.version), s.start, s.end) for s in meta.weight_versions)
    ends = [0, *(s.end for s in spans)]
    if ends[-1] != tokens or any(s.start != before or s.end <= s.start for s, before in zip(spans, ends, strict=False)):
        raise Refused(f"weight_versions don't cover the {tokens} output tokens once each")
    return spans


def _version(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise Refused(f"weight_version {text!r} is not a policy version: the engine must be given one before it serves") from None
