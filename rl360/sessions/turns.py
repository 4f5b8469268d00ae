"""The state of one session: a tree of turns, what they were asked and told, and whether the session has ended. No I/O.

Tokens are kept as a JSON fragment a turn ("17,4,256"): the next request to the engine joins the fragments of its ancestors, so an
old token is written out once in its life. A turn is added by `commit` and never changes; nothing else changes the tree (S5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from rl360.bus.events import TurnCompleted
from rl360.sessions.history import Digest, digest, link
from rl360.sessions.messages import Message
from rl360.sessions.replies import Reply


class Ended(Exception):
    """The session takes no further turns (S7). `reason`: length | context | closed."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"session_ended: {reason}: {detail}")
        self.reason = reason


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One committed model call."""

    number: int
    branch: int
    parent: int
    asked: Digest
    told: Digest
    fragment: bytes  # JSON of its prompt and output ids, comma-separated, no brackets
    total: int  # tokens of the conversation, this turn's output included
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    reply: Reply
    finish_reason: str
    request_id: str
    ended: float
    rolled_back: int = 0


def fragment(ids: Sequence[int]) -> bytes:
    """Ids as they stand inside a JSON list.

    >>> fragment([1, 20])
    b'1,20'
    """
    return msgspec.json.encode(ids)[1:-1]


def reply_message(reply: Reply) -> Message:
    """The assistant's message that the agent will send back."""
    return Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)


class Tree:
    """Turns of a session, numbered 1, 2, … as committed."""

    def __init__(self) -> None:
        self.turns: Final[list[Turn]] = []
        self.by_asked: Final[dict[Digest, Turn]] = {}
        self.by_told: Final[dict[Digest, Turn]] = {}
        self.by_request: Final[dict[str, Turn]] = {}
        self.dropped: Final[set[int]] = set()
        self._children: Final[dict[int, list[Turn]]] = {}

    @property
    def branches(self) -> int:
        """Branches so far, the first one included."""
        return 1 + max((t.branch for t in self.turns), default=0)

    @property
    def truncated(self) -> Turn | None:
        """The turn that was cut off, after which nothing may follow (S7)."""
        return next((t for t in self.turns if t.finish_reason == "length"), None)

    def children(self, turn: int) -> Sequence[Turn]:
        return self._children.get(turn, ())

    def get(self, number: int) -> Turn:
        return self.turns[number - 1]

    def total(self, turn: int) -> int:
        """Tokens of the conversation up to and including `turn` (0: none)."""
        return self.get(turn).total if turn else 0

    def path(self, turn: int) -> list[int]:
        """Numbers of the turns that `turn` continues, oldest first, itself last."""
        numbers: list[int] = []
        while turn:
            numbers.append(turn)
            turn = self.get(turn).parent
        return numbers[::-1]

    def prefix(self, turn: int) -> list[bytes]:
        """Fragments of the conversation up to and including `turn`."""
        return [self.get(n).fragment for n in self.path(turn)]

    def commit(self, turn: Turn) -> None:
        """Add the next turn. Raises ValueError when it isn't the next one, or when it continues nothing."""
        if turn.number != len(self.turns) + 1 or turn.parent >= turn.number or turn.rolled_back >= turn.number:
            raise ValueError(f"turn {turn.number} (parent {turn.parent}) can't follow {len(self.turns)} turns")
        self.turns.append(turn)
        self.by_asked.setdefault(turn.asked, turn)
        self.by_told[turn.told] = turn
        self.by_request[turn.request_id] = turn
        self._children.setdefault(turn.parent, []).append(turn)
        if turn.rolled_back:
            self.dropped.add(turn.rolled_back)


def turn_of(event: TurnCompleted, prompt: Sequence[int], output: Sequence[int], reply: Reply) -> Turn:
    """The turn that a journal event records, given its ids."""
    asked = bytes.fromhex(event.history)
    return Turn(
        number=event.turn,
        branch=event.branch,
        parent=event.parent,
        asked=asked,
        told=link(asked, digest(reply_message(reply))),
        fragment=b",".join(f for f in (fragment(prompt), fragment(output)) if f),
        total=event.base + len(prompt) + len(output),
        prompt_tokens=event.prompt_tokens,
        output_tokens=len(output),
        cached_tokens=event.cached_tokens,
        reply=reply,
        finish_reason=event.finish_reason,
        request_id=event.request_id,
        ended=event.ended,
        rolled_back=event.rolled_back,
    )
