"""Which token sequence each KV slot holds, and where a new request goes. Pure bookkeeping: no tensors.

A request continues in the slot that holds its longest prefix, so a session finds its own KV again without being named.
A prefix that somebody else may still need is copied out of its slot instead of cut short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stamp(NamedTuple):
    """The weights that wrote KV rows from `start` on: `epoch` counts swaps of weights, `version` is their label."""

    epoch: int
    version: str
    start: int


class Slot:
    """One sequence's place in the KV cache. KV rows [0, rows) hold `ids[:rows]`."""

    __slots__ = ("busy", "ids", "index", "rows", "stamps", "used")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ids: list[int] = []
        self.rows = 0
        self.stamps: list[Stamp] = []
        self.busy = False
        self.used = 0  # when it was last given up, in releases; the least is evicted first

    def cut(self, rows: int) -> None:
        """Forget the rows from `rows` on."""
        self.rows = rows
        self.stamps = [s for s in self.stamps if s.start < rows]

    def stamp(self, epoch: int, version: str) -> None:
        """Rows written from now on are by these weights."""
        if self.stamps and self.stamps[-1].start == self.rows:
            del self.stamps[-1]  # it wrote nothing
        if not self.stamps or self.stamps[-1][:2] != (epoch, version):
            self.stamps.append(Stamp(epoch, version, self.rows))


class Placement(NamedTuple):
    """Run in `slot`, whose first `cached` rows are good once copied from `source` (None: they are there already)."""

    slot: Slot
    cached: int
    source: Slot | None


class Slots:
    """All slots of an engine."""

    def __init__(self, count: int) -> None:
        self.all = [Slot(i) for i in range(count)]
        self._releases = 0

    @property
    def rows(self) -> int:
        """KV rows held."""
        return sum(s.rows for s in self.all)

    def place(self, ids: Sequence[int]) -> Placement | None:
        """Where `ids` best continue, or None while every slot is busy. At least the last token is always computed."""
        if all(s.busy for s in self.all):
            return None
        limit = len(ids) - 1
        matches = [(common_prefix(s.ids, ids, min(s.rows, limit)), s) for s in self.all]
        cached, best = max(matches, key=lambda m: m[0])
        idle = [m for m in matches if not m[1].busy]
        whole = [s for n, s in idle if n == cached and n == s.rows]  # nothing beyond the prefix would be lost
        if cached and whole:
            return Placement(whole[0], cached, None)
        victim = min((s for _, s in idle), key=lambda s: (s.rows > 0, s.used))
        if victim is best or not cached:
            return Placement(victim, cached, None)
        return Placement(victim, cached, best)

    def take(self, placement: Placement, ids: list[int]) -> None:
        """Give the slot to a request; `ids` is its own growing list."""
        slot, cached, source = placement
        slot.busy = True
        if source is not None:
            slot.stamps = list(source.stamps)
        slot.cut(cached)
        slot.ids = ids

    def release(self, slot: Slot) -> None:
        """The request is done; its rows stay until they are evicted."""
        self._releases += 1
        slot.busy, slot.used = False, self._releases

    def flush(self) -> None:
        """Forget every idle slot's rows."""
        for slot in self.all:
            if not slot.busy:
                slot.cut(0)
                slot.ids = []


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first `limit` items agree. `limit` exceeds neither length.

    >>> common_prefix([1, 2, 3, 4], [1, 2, 9, 4], 4)
    2
    """
    if not limit or a[0] != b[0]:
        return 0
    if a[:limit] == b[:limit]:
        return limit
    low, high = 1, limit  # the first `low` agree, the first `high` don't
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
