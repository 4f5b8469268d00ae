"""Where a sandbox runs: what a node has for it, which images the node holds, and which nodes hold an image (CASES 41). Pure.

A reservation is admission control: a sandbox starts only where its whole memory and CPU are free. Limits alone guarantee
nothing, since all sandboxes of a node may want what each of them is allowed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory (MiB) and CPU (thousandths of one, so that sums are exact)."""

    memory_mb: int = 0
    milli_cpus: int = 0

    @classmethod
    def of(cls, memory_mb: int, cpus: float) -> Need:
        """
        >>> Need.of(256, 0.5)
        Need(memory_mb=256, milli_cpus=500)
        """
        return cls(memory_mb=memory_mb, milli_cpus=math.ceil(cpus * 1000))

    def __add__(self, other: Need) -> Need:
        return Need(memory_mb=self.memory_mb + other.memory_mb, milli_cpus=self.milli_cpus + other.milli_cpus)

    def __sub__(self, other: Need) -> Need:
        return Need(memory_mb=self.memory_mb - other.memory_mb, milli_cpus=self.milli_cpus - other.milli_cpus)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node: its `total` (0: not bounded), what is `reserved` of it, the images that it has and those that it pulls."""

    total: Need = Need()
    reserved: Need = Need()
    warm: frozenset[str] = frozenset()
    pulling: frozenset[str] = frozenset()

    def fits(self, need: Need) -> bool:
        """Whether all of `need` is free."""
        after = self.reserved + need
        return _within(after.memory_mb, self.total.memory_mb) and _within(after.milli_cpus, self.total.milli_cpus)

    def could_fit(self, need: Need) -> bool:
        """Whether it would fit if nothing were reserved: if not, it would wait for ever."""
        return replace(self, reserved=Need()).fits(need)

    def is_cold(self, image: str) -> bool:
        """Whether a start from this image has to pull it; "" is no image."""
        return bool(image) and image not in self.warm

    def begin(self, image: str, need: Need) -> Node:
        """A sandbox is being started: its need is reserved, and its image pulled where the node hasn't got it.

        Raises ValueError where it doesn't fit, or while another start pulls the same image: both are for `waves.pick` to see.
        """
        if not self.fits(need):
            raise ValueError(f"{need} does not fit: {self.reserved} of {self.total} is reserved")
        if image in self.pulling:
            raise ValueError(f"{image} is being pulled already")
        pulling = self.pulling | {image} if self.is_cold(image) else self.pulling
        return replace(self, reserved=self.reserved + need, pulling=pulling)

    def started(self, image: str, *, ok: bool) -> Node:
        """A start ended. One that went well leaves its image warm; one that failed proves nothing about it."""
        return replace(self, pulling=self.pulling - {image}, warm=self.warm | {image} if ok and image else self.warm)

    def end(self, need: Need) -> Node:
        """A sandbox is gone: what it had reserved is free."""
        return replace(self, reserved=self.reserved - need)


def nodes_of(image: str, nodes: Collection[str], spread: int) -> tuple[str, ...]:
    """The `spread` nodes that an image is pinned to, best first (rendezvous hashing).

    A node that goes moves only the images that were on it, each to one other node; a node that comes takes only what is now its own.
    """
    return tuple(sorted(nodes, key=lambda node: (_weight(image, node), node), reverse=True)[:spread])


def place(pinned: Collection[str], load: Mapping[str, int]) -> str:
    """Of the nodes that an image is pinned to, the least loaded; of equals, the first."""
    return min(pinned, key=lambda node: load[node])


def _weight(image: str, node: str) -> bytes:
    return hashlib.blake2b(f"{image}\0{node}".encode(), digest_size=8).digest()


def _within(amount: int, total: int) -> bool:
    return total == 0 or amount <= total
