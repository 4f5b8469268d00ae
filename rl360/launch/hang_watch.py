"""Processes that live on and do nothing: stopped, deadlocked, or with an event loop that is stuck. The supervisor ends them. Pure.

Every worker gives a sign of life once a second (`pulse`). Its silence is counted in what the supervisor itself saw: time in
which the supervisor was stopped or the machine asleep is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

START: Final = 300.0
"""Seconds that a process has until its first sign of life: it imports and loads before that."""
GAP: Final = 15.0
"""Seconds between two looks after which silence is counted anew."""


class Pulse(NamedTuple):
    """`beat` changes with every sign of life of the process `pid`; 0: it has given none."""

    pid: int
    beat: float


class HangWatch:
    """`hang_seconds`: of silence, after which a process is ended."""

    def __init__(self, hang_seconds: float, start_seconds: float = START) -> None:
        self._hang, self._start = hang_seconds, max(start_seconds, hang_seconds)
        self._looked = 0.0
        self._changed: dict[str, tuple[Pulse, float]] = {}  # name -> its newest pulse, and when that was new

    def silent(self, now: float, pulses: Mapping[str, Pulse]) -> dict[str, str]:
        """Which processes to end, and why. `now`: seconds of a clock that never jumps."""
        known = self._changed if now - self._looked <= GAP else {}
        self._looked = now
        self._changed = {n: known[n] if n in known and known[n][0] == p else (p, now) for n, p in pulses.items()}
        return {n: why for n, (pulse, since) in self._changed.items() if (why := self._why(pulse, now - since))}

    def _why(self, pulse: Pulse, silence: float) -> str:
        if not pulse.beat:
            return f"it gave no sign of life in {self._start:g} s since its start" if silence > self._start else ""
        return f"it hangs: no sign of life for {self._hang:g} s (supervise.hang_seconds)" if silence > self._hang else ""
