"""Engines whose process lives on and is of no use: the supervisor ends them, so that new generations can start. Pure.

Two kinds: a generation that membership gave up (its server hangs, it missed a push) and that did not end by itself; and a
process that has not joined within `engine.start_seconds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rl360.bus import events as ev

FOLDED: Final[tuple[type[ev.Event], ...]] = (ev.EngineJoined, ev.EngineLost, ev.EngineFenced)
GOODBYE: Final = 3.0
"""Seconds that a generation has to end by itself after it was given up."""


@dataclass(frozen=True)
class Process:
    """A running engine worker: its process id, and when it was started (unix seconds)."""

    pid: int
    started: float


class EngineWatch:
    """Fold of `FOLDED` over the journal from the supervisor's own start on; processes of earlier starts are no concern of its."""

    def __init__(self, start_seconds: float) -> None:
        self._start_seconds = start_seconds
        self._joined: dict[int, tuple[float, str]] = {}  # process id -> when its newest generation joined, its name
        self._given_up: dict[str, tuple[float, str]] = {}  # generation -> when (unix seconds), why

    def on(self, event: ev.Event, at: float) -> None:
        """Fold an event that was recorded `at` (unix seconds)."""
        if isinstance(event, ev.EngineJoined):
            self._joined[event.pid] = (at, event.generation)
        elif isinstance(event, ev.EngineLost | ev.EngineFenced):
            self._given_up.setdefault(event.generation, (at, event.cause))

    def useless(self, now: float, engines: Mapping[str, Process]) -> dict[str, str]:
        """Which of the running engine workers to end, and why."""
        return {worker: why for worker, process in engines.items() if (why := self._why(now, process))}

    def _why(self, now: float, process: Process) -> str:
        joined, generation = self._joined.get(process.pid, (0.0, ""))
        if joined < process.started:  # none, or one of an earlier process of this number
            late = now - process.started > self._start_seconds
            return f"it has not joined {self._start_seconds:g} s after its start (engine.start_seconds)" if late else ""
        at, cause = self._given_up.get(generation, (now, ""))
        return f"{generation} was given up ({cause}) and did not end" if now - at > GOODBYE else ""
