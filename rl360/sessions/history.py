"""Where an agent's incoming history stands in the stored conversation (S4). Pure.

Messages are compared by digests of what they mean: role, flat text, tool calls with parsed arguments. Key order, spaces, call ids,
content parts against plain text, `developer` against system and `content: null` make no difference. Digests are chained, so that a
conversation of n messages is one digest and its prefixes are the n before it; the tools are its root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

import blake3
import msgspec

from rl360.sessions.messages import Message, Role, Tool

Digest = bytes
"""16 bytes of blake3."""

_EXACT: Final = 2.0**63
"""Below it a float that is whole is an integer that JSON's encoder can write."""


class Append(msgspec.Struct, frozen=True):
    """Messages from `new` on continue turn `parent` (0: the session has no turn yet) on its own branch."""

    parent: int
    new: int


class Retry(msgspec.Struct, frozen=True):
    """Turn `turn` has answered exactly this (S5)."""

    turn: int


class Rollback(msgspec.Struct, frozen=True):
    """As Append, after the agent dropped or rewrote one trailing reply: turn `dropped`."""

    parent: int
    new: int
    dropped: int


class Branch(msgspec.Struct, frozen=True):
    """Any other divergence: messages from `new` on continue turn `parent` (0: nothing) as a branch of their own."""

    parent: int
    new: int


Match = Append | Retry | Rollback | Branch


class Node(Protocol):
    """What matching needs to know of a stored turn."""

    @property
    def number(self) -> int: ...
    @property
    def parent(self) -> int: ...
    @property
    def asked(self) -> Digest:
        """Digest of the conversation that it answered."""
        ...

    @property
    def told(self) -> Digest:
        """Digest of that conversation and its reply."""
        ...


class Tree(Protocol):
    """Stored turns, looked up by digest."""

    @property
    def by_asked(self) -> Mapping[Digest, Node]: ...
    @property
    def by_told(self) -> Mapping[Digest, Node]: ...
    @property
    def dropped(self) -> frozenset[int] | set[int]:
        """Turns that were rolled back."""
        ...

    def children(self, turn: int) -> Sequence[Node]: ...


def match(tree: Tree, chain: Sequence[Digest], roles: Sequence[Role]) -> Match:
    """Place a conversation of n messages (`roles`; `chain` holds n + 1 digests, the first one of no message)."""
    answered = tree.by_asked.get(chain[-1])
    if answered is not None:
        return Retry(answered.number)
    parent, new = _deepest(tree, chain)
    children = tree.children(parent)
    if not children and parent not in tree.dropped:
        return Append(parent, new)
    for child in reversed(children):
        if _is_rollback(tree, child, chain, roles, new):
            return Rollback(parent, new, child.number)
    return Branch(parent, new)


def _deepest(tree: Tree, chain: Sequence[Digest]) -> tuple[int, int]:
    """The last stored turn whose whole conversation the incoming one begins with, and how many messages that is."""
    for i in range(len(chain) - 2, 0, -1):
        node = tree.by_told.get(chain[i])
        if node is not None:
            return node.number, i
    return 0, 0


def _is_rollback(tree: Tree, child: Node, chain: Sequence[Digest], roles: Sequence[Role], new: int) -> bool:
    """The incoming conversation goes on after what `child` was asked, without its reply; nothing was built on that reply."""
    if child.number in tree.dropped or tree.children(child.number):
        return False
    asked = next((i for i in range(new + 1, len(chain) - 1) if chain[i] == child.asked), None)
    return asked is not None and "assistant" not in roles[asked + 1 :]


def digest(message: Message) -> Digest:
    """What a message means. An assistant's text counts without outer white space: harnesses trim it."""
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [(c.name, _plain(c.arguments)) for c in message.tool_calls]
    return _hash(msgspec.json.encode((message.role, content, calls), order="deterministic"))


def root(tools: Sequence[Tool]) -> Digest:
    """The digest of no messages under these tools."""
    return _hash(msgspec.json.encode(_plain([t.openai() for t in tools]), order="deterministic"))


def link(before: Digest, message: Digest) -> Digest:
    """The digest of a conversation with one message more."""
    return _hash(before + message)


def chained(start: Digest, messages: Iterable[Digest]) -> list[Digest]:
    """Digests of all prefixes, `start` (no message) first."""
    chain = [start]
    for message in messages:
        chain.append(link(chain[-1], message))
    return chain


def _hash(data: bytes) -> Digest:
    return blake3.blake3(data).digest(length=16)


def _plain(value: Any) -> Any:
    """JSON data in which 1.0 and 1 are one number, as they are to a harness that isn't written in Python."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in cast(Sequence[Any], value)]
    return value
