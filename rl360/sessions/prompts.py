"""The prompt of a turn: which stored turn it continues, and which ids are new. Pure."""

from __future__ import annotations

import msgspec

from rl360.sessions.history import Append, Branch, Rollback
from rl360.sessions.turns import Tree, fragment


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn will be sampled from: `base` stored tokens of turn `parent`, then `new` ids."""

    number: int
    branch: int
    parent: int
    dropped: int
    asked: bytes
    base: int
    new: list[int]
    json: bytes  # all ids, as in a JSON list
    best_cached: int

    @property
    def tokens(self) -> int:
        return self.base + len(self.new)


def build(tree: Tree, place: Append | Rollback | Branch, new: list[int], asked: bytes) -> Prompt:
    """The prompt of the next turn. Old ids come as they were written out when they were new."""
    parts = [*tree.prefix(place.parent), fragment(new)]
    return Prompt(
        number=len(tree.turns) + 1,
        branch=_branch(tree, place),
        parent=place.parent,
        dropped=place.dropped if isinstance(place, Rollback) else 0,
        asked=asked,
        base=tree.total(place.parent),
        new=new,
        json=b",".join(p for p in parts if p),
        best_cached=best_cached(tree, place.parent, new),
    )


def best_cached(tree: Tree, parent: int, new: list[int]) -> int:
    """The most that a perfect cache of this session alone could hold of a prompt.

    For a first turn 0; else all of the parent's tokens but the last, whose key and value are written only when it is fed back.
    A turn that replaces another one, or branches off beside it, shares that one's prompt as far as the ids agree.
    """
    base = tree.total(parent)
    best = max(base - 1, 0)
    for sibling in tree.children(parent):
        other = msgspec.json.decode(b"[" + sibling.fragment + b"]", type=list[int])[:-1]
        same = next((i for i, (a, b) in enumerate(zip(new, other, strict=False)) if a != b), min(len(new), len(other)))
        best = max(best, min(base + same, base + len(new) - 1))
    return best


def _branch(tree: Tree, place: Append | Rollback | Branch) -> int:
    if isinstance(place, Branch):
        return tree.branches
    continued = place.dropped if isinstance(place, Rollback) else place.parent
    return tree.get(continued).branch if continued else 0
