"""A session without a server: the pure parts of a turn, with sampled tokens that are all different."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np

from rl360.bus.events import TurnCompleted, VersionSpan
from rl360.bus.payload import Payload
from rl360.sessions import history, prompts
from rl360.sessions.history import Retry, chained, digest, root
from rl360.sessions.messages import Message
from rl360.sessions.replies import Reply
from rl360.sessions.templates import get_template
from rl360.sessions.turns import Tree, Turn, turn_of
from tests.sessions.tokens import tokenizer

FIRST_SAMPLED = 1_000_000


def pack(data: bytes) -> Payload:
    return Payload(size=len(data), inline=data)


def unpack(payload: Payload) -> bytes:
    assert payload.inline is not None
    return payload.inline


@cache
def _root() -> bytes:
    return root([])


class PureSession:
    """`ask` is a request: it gives the turn, old or new. `sampled`: every token that was sampled, by turn."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.events: list[TurnCompleted] = []
        self.sent: dict[int, list[int]] = {}  # whole conversation of a turn: prompt and output
        self.sampled: dict[int, list[int]] = {}
        self._ids = itertools.count(FIRST_SAMPLED)
        self.template = get_template("k2v3", tokenizer())

    def ask(self, messages: Sequence[Message], *, tokens: int = 3, cut: bool = False, split: int = 0, format_error: bool = False) -> Turn:
        chain = chained(_root(), (digest(m) for m in messages))
        place = history.match(self.tree, chain, [m.role for m in messages])
        if isinstance(place, Retry):
            return self.tree.get(place.turn)
        new = list(messages[place.new :])
        ids = (self.template.suffix(new) if place.parent else self.template.render(new)) + self.template.generation_prompt
        prompt = prompts.build(self.tree, place, ids, chain[-1])
        output = list(itertools.islice(self._ids, tokens))
        event = self._event(prompt, output, cut, split, format_error)
        turn = turn_of(event, ids, output, Reply(content=f"reply {prompt.number}"))
        self.tree.commit(turn)
        self.events.append(event)
        self.sampled[turn.number] = output
        self.sent[turn.number] = [*self.sent.get(prompt.parent, []), *ids, *output]
        assert prompt.json == b",".join(str(i).encode() for i in self.sent[turn.number][: -len(output)])
        return turn

    def reply(self, turn: Turn) -> Message:
        return Message(role="assistant", content=turn.reply.content)

    def _event(self, prompt: prompts.Prompt, output: list[int], cut: bool, split: int, format_error: bool) -> TurnCompleted:
        n, number = len(output), prompt.number
        spans = (VersionSpan(number, 0, split), VersionSpan(number + 1, split, n)) if 0 < split < n else (VersionSpan(number, 0, n),)
        return TurnCompleted(
            run="test",
            step=1,
            attempt="t1-g000-a0",
            group=0,
            session="t1-g000-a0.1",
            turn=number,
            branch=prompt.branch,
            parent=prompt.parent,
            base=prompt.base,
            prompt_ids=pack(np.array(prompt.new, "<i4").tobytes()),
            output_ids=pack(np.array(output, "<i4").tobytes()),
            logprobs=pack(np.array([logprob(i) for i in output], "<f4").tobytes()),
            spans=spans,
            finish_reason="length" if cut else "stop",
            cached_tokens=0,
            prompt_tokens=prompt.tokens,
            best_cached=prompt.best_cached,
            generation="g",
            request_id=f"r{number}",
            started=0.0,
            ended=1.0,
            format_error=format_error,
            rolled_back=prompt.dropped,
            history=prompt.asked.hex(),
        )


def logprob(token: int) -> float:
    """The log-prob that the driver gives a sampled token."""
    return float(np.float32(-((token * 7919) % 1000) / 250 - 0.001))
