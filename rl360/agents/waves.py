"""Admission in waves (CASES 41): thousands of sandboxes never start at once. Pure: a decision, no clock and no state.

The scheduler calls `next_wave` whenever something changed or `Wave.again` has come, and admits what it is told.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """Attempts to admit now, and when to ask again (unix seconds).

    `again` is None when nothing waits, or when only an attempt that finishes its start can make room: that is an
    event, not a time.
    """

    attempts: tuple[str, ...]
    again: float | None


def starting(admitted: Collection[str], started: Collection[str], ended: Collection[str]) -> int:
    """Attempts in their start: admitted, their agent not yet running, no terminal outcome.

    >>> starting({"a", "b", "c"}, started={"a"}, ended={"b"})
    1
    """
    return len(set(admitted) - set(started) - set(ended))


def next_wave(
    waiting: Sequence[str], *, size: int, interval: float, max_starting: int, in_start: int, last: float | None, now: float
) -> Wave:
    """At most `size` attempts each `interval` seconds, while fewer than `max_starting` are starting.

    `waiting` is in order of admission, `last` is when the last wave went (None: none yet), `in_start` is `starting(…)`.

    >>> next_wave(["a", "b", "c"], size=2, interval=0.5, max_starting=8, in_start=0, last=None, now=10.0)
    Wave(attempts=('a', 'b'), again=10.5)
    >>> next_wave(["c"], size=2, interval=0.5, max_starting=8, in_start=2, last=10.0, now=10.2)
    Wave(attempts=(), again=10.5)
    >>> next_wave(["c"], size=2, interval=0.5, max_starting=2, in_start=2, last=10.0, now=11.0)
    Wave(attempts=(), again=None)
    """
    if not waiting:
        return Wave((), None)
    if last is not None and now < last + interval:
        return Wave((), last + interval)
    room = max(0, min(size, max_starting - in_start))
    chosen = tuple(waiting[:room])
    more = len(chosen) < len(waiting) and in_start + len(chosen) < max_starting
    return Wave(chosen, now + interval if chosen and more else None)
