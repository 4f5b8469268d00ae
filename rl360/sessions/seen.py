"""What a session's last request was, byte for byte: messages that stand where they stood then are neither split nor parsed again. Pure.

The old messages are most of a body, so reading one costs a comparison of their bytes and the parsing of what is new.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from rl360.sessions.history import Digest
from rl360.sessions.messages import Role, Tool

MARK: Final = b"0"
"""Stands for the known messages in a text that is left to parse; no message is a number."""


class Seen(msgspec.Struct):
    """The last request of a session: what its bytes were, and what they meant. Nothing here decides a match by itself.

    `head`: its bytes before the first message. `raw`: the messages, each with the comma and white space before it.
    """

    head: bytes = b""
    raw: list[bytes] = []
    tools_raw: bytes = b""
    tools: tuple[Tool, ...] = ()
    roles: list[Role] = []
    chain: list[Digest] = []


class Unread(msgspec.Struct, frozen=True):
    """A body: the first `known` messages of `data` are those of the last request, and a MARK at `start` stands for them in `text`."""

    data: bytes
    text: bytes
    known: int = 0
    start: int = 0

    def whole(self) -> Unread:
        """The same body with nothing left out."""
        return Unread(self.data, self.data)

    def holds(self, messages: list[msgspec.Raw]) -> bool:
        """`messages`, views into the text, begin with the known ones. A body with two lists of messages may mean the other one."""
        return not self.known or (bool(messages) and bytes(messages[0]) == MARK and _offset(messages[0], self.text) == self.start)


def unread(data: bytes, seen: Seen) -> Unread:
    """What is left to parse of a body."""
    at, known = len(seen.head), 0
    if data.startswith(seen.head):
        for raw in seen.raw:
            if not data.startswith(raw, at):
                break
            at += len(raw)
            known += 1
    return Unread(data, seen.head + MARK + data[at:], known, len(seen.head)) if known else Unread(data, data)


def split(body: Unread, messages: list[msgspec.Raw], seen: Seen) -> tuple[bytes, list[bytes]]:
    """`head` and `raw` of a body that holds `messages`."""
    text, start = body.text, _offset(messages[0], body.text)
    ends = [start, *(_offset(m, text) + memoryview(m).nbytes for m in messages)]
    raw = [text[a:b] for a, b in pairwise(ends)]
    return text[:start], seen.raw[: body.known] + raw[1:] if body.known else raw


def _offset(view: msgspec.Raw, text: bytes) -> int:
    """Where in `text` the view begins: msgspec's raw values are not copies."""
    return _address(view) - _address(text)


def _address(data: bytes) -> int:
    return np.frombuffer(data, np.uint8).__array_interface__["data"][0]
