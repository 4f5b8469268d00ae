"""A registry of a given rate: the pulls under way share it equally, and no pull is faster than its node. Pure.

All pulls under way have the same speed, so one number, what each of them got so far since the beginning of time, says it all.
"""

from __future__ import annotations

import heapq
import math


class Registry:
    """`rate` and `pull_rate` in MB/s, `size` of an image in MB. Times never go back."""

    def __init__(self, rate: float, pull_rate: float, size: float) -> None:
        self._rate, self._pull_rate, self._size = rate, pull_rate, size
        self._now = self._got = 0.0
        self._began: dict[int, float] = {}  # pull -> what each had got when it began
        self._ends: list[tuple[float, int]] = []
        self.served = 0.0  # MB

    @property
    def pulls(self) -> int:
        return len(self._began)

    def begin(self, pull: int, now: float) -> None:
        self._advance(now)
        self._began[pull] = self._got
        heapq.heappush(self._ends, (self._got + self._size, pull))

    def end(self, pull: int, now: float) -> None:
        """It is done or given up."""
        self._advance(now)
        del self._began[pull]

    def next(self) -> tuple[float, int] | None:
        """When the next pull is done, if no other begins or ends, and which."""
        while self._ends and self._began.get(self._ends[0][1], math.inf) + self._size != self._ends[0][0]:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        end, pull = self._ends[0]
        return self._now + max(0.0, end - self._got) / self._speed(), pull

    def _advance(self, now: float) -> None:
        if self._began:
            share = self._speed() * (now - self._now)
            self._got += share
            self.served += share * len(self._began)
        self._now = now

    def _speed(self) -> float:
        return min(self._pull_rate, self._rate / len(self._began))
