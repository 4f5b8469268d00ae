"""What an engine must say of its weights to prove that it holds the trainer's (CASES 31).

Engines hash what they hold, each in its own layout and by its own hash; the trainer computes the same from its own tensors.
So agreement is proven bit for bit, and an engine whose layout isn't known here never agrees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from torch import Tensor

from rl360.engines.checksum import checksum_of, combined
from rl360.engines.dialect import Dialect
from rl360.engines.sglang.checksum import checksums

Sums = list[dict[str, str]]
"""Checksum by name, for each rank of an engine."""


def sums_of(weights: Mapping[str, Tensor], dialect: Dialect) -> Sums:
    """What an engine of this kind answers when it holds `weights` (by Hugging Face's names, in the engine's dtype)."""
    if dialect.sums == "named":
        return [checksum_of(weights.items())]
    return checksums(weights, kind=dialect.sums, tp=dialect.tp, ep=dialect.ep)


class Holdings:
    """Expected checksums of one set of weights: computed once for each kind of engine, off the loop."""

    def __init__(self, weights: Mapping[str, Tensor], elsewhere: Mapping[str, str]) -> None:
        """`elsewhere`: checksums by name of weights that other ranks of the trainer have."""
        self._weights, self._elsewhere = weights, dict(elsewhere)
        self._expected: dict[tuple[str, int, int], Sums] = {}
        self.digest = ""  # of the trainer's own weights, whoever holds them

    async def prepare(self, dialects: Iterable[Dialect]) -> None:
        for dialect in dialects:
            if _kind(dialect) not in self._expected:
                self._expected[_kind(dialect)] = await asyncio.to_thread(self._sums, dialect)
        if not self.digest:
            self.digest = combined(await asyncio.to_thread(checksum_of, self._weights.items()) | self._elsewhere)

    def _sums(self, dialect: Dialect) -> Sums:
        return [rank | self._elsewhere for rank in sums_of(self._weights, dialect)]

    def disagreement(self, held: Sums, dialect: Dialect) -> str:
        """Empty when an engine holds these weights; else the first names that differ."""
        return differences(held, self._expected[_kind(dialect)])


def differences(held: Sums, expected: Sums) -> str:
    """Names whose checksum is missing, left over or another one.

    >>> differences([{"a": "1"}], [{"a": "1"}])
    ''
    >>> differences([{"a": "1", "c": "3"}], [{"a": "2", "b": "2"}])
    'a, b, c'
    """
    if len(held) != len(expected):
        return f"{len(held)} ranks where {len(expected)} were expected"
    pairs = zip(held, expected, strict=True)
    names = sorted({name for ours, theirs in pairs for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _kind(dialect: Dialect) -> tuple[str, int, int]:
    return dialect.sums, dialect.tp, dialect.ep
