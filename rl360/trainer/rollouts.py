"""Attempts between request and outcome: admitted in waves, given up when their outer deadline passes (S15, S16, CASES 35, 36, 41)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rl360.agents.waves import wave_size
from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.config import BudgetSection, Waves
from rl360.trainer.draw import TaskRef

FOLDED: Final[tuple[type[ev.Event], ...]] = (
    ev.RunStarted,
    ev.RolloutRequested,
    ev.RolloutAdmitted,
    ev.RolloutPhase,
    ev.VerifierResult,
    ev.InfraFailed,
    ev.EngineReady,
    ev.EngineLost,
    ev.EngineFenced,
)

NO_LIFE: Final = 0
"""Life of the session that an attempt's failure names when the scheduler gives it up: no runner ever had it under that name."""


def budgets(section: BudgetSection, task: TaskRef | None = None) -> ev.Budgets:
    """Budgets of an attempt: the recipe's, or the task's own where those are shorter (S15).

    An `outer` above the sum of the recipe's phases widens the margin.
    """
    phases = section.queue + section.setup + section.agent + section.verify + section.collect
    return ev.Budgets(
        queue=section.queue,
        setup=section.setup,
        agent=min(section.agent, task.agent_timeout) if task else section.agent,
        verify=min(section.verify, task.verifier_timeout) if task else section.verify,
        collect=section.collect,
        margin=max(section.margin, section.outer - phases),
    )


@dataclass
class _Flight:
    admitted: ev.RolloutAdmitted
    life: int = 0  # of the newest session seen; 0: no runner took it yet
    phase: ev.Phase = ev.Phase.QUEUE


class Rollouts:
    """Fold of `FOLDED`, and what is due at a time. What `due` says is folded at once, so it says it once."""

    def __init__(self, waves: Waves, max_lives: int) -> None:
        self._waves = waves
        self._max_lives = max_lives
        self._pending: dict[str, ev.RolloutRequested] = {}
        self._flying: dict[str, _Flight] = {}
        self._starting: set[str] = set()  # admitted, sandbox not up yet
        self._over: set[str] = set()
        self._engines: set[str] = set()
        self._wave = -1
        self._last_wave: float | None = None
        self._resumed_at = 0.0

    def on(self, recorded: Recorded) -> None:
        match recorded.event:
            case ev.RunStarted():
                self._resumed_at = recorded.time
            case ev.RolloutRequested() as request:
                if request.attempt not in self._flying and request.attempt not in self._over:
                    self._pending[request.attempt] = request
            case ev.RolloutAdmitted() as admitted:
                self._admit(admitted)
            case ev.RolloutPhase() as phase:
                self._see(phase)
            case ev.VerifierResult() | ev.InfraFailed() as outcome:
                self._end(outcome.attempt)
            case ev.EngineReady() as engine:
                self._engines.add(engine.generation)
            case ev.EngineLost() | ev.EngineFenced() as engine:
                self._engines.discard(engine.generation)
            case _:
                pass

    def due(self, now: float) -> Iterator[ev.RolloutAdmitted | ev.InfraFailed]:
        """Attempts to give up and attempts to admit at `now` (unix seconds)."""
        yield from self._give_up(now)
        yield from self._next_wave(now)

    def _admit(self, admitted: ev.RolloutAdmitted) -> None:
        self._pending.pop(admitted.attempt, None)
        if admitted.attempt in self._over:
            return
        if admitted.attempt not in self._flying:
            self._starting.add(admitted.attempt)
        flight = self._flying.setdefault(admitted.attempt, _Flight(admitted))
        flight.admitted = admitted
        self._wave = max(self._wave, admitted.wave)
        self._last_wave = max(self._last_wave or 0.0, admitted.admitted)

    def _see(self, phase: ev.RolloutPhase) -> None:
        flight = self._flying.get(phase.attempt)
        if flight is None:
            return
        flight.life = max(flight.life, ev.life_of(phase.session))
        flight.phase = phase.phase
        if phase.phase is not ev.Phase.QUEUE and (phase.phase is not ev.Phase.SETUP or phase.end is not None):
            self._starting.discard(phase.attempt)

    def _end(self, attempt: str) -> None:
        self._over.add(attempt)
        self._pending.pop(attempt, None)
        self._flying.pop(attempt, None)
        self._starting.discard(attempt)

    def _next_wave(self, now: float) -> Iterator[ev.RolloutAdmitted]:
        """Admissions wait while no engine is ready: an agent's clock must not run against a start-up or an outage."""
        if not self._engines:
            return
        size = wave_size(self._waves, pending=len(self._pending), starting=len(self._starting), last=self._last_wave, now=now)
        wave = self._wave + 1
        for request in list(self._pending.values())[:size]:
            admitted = _admitted(request, wave, now)
            self._admit(admitted)
            yield admitted

    def _give_up(self, now: float) -> Iterator[ev.InfraFailed]:
        """Attempts whose outer deadline passed. While the whole run was down, no clock ran."""
        late = [f for f in self._flying.values() if now > max(f.admitted.admitted, self._resumed_at) + f.admitted.budgets.outer]
        for flight in late:
            self._end(flight.admitted.attempt)
            yield self._failure(flight)

    def _failure(self, flight: _Flight) -> ev.InfraFailed:
        attempt, seconds = flight.admitted.attempt, flight.admitted.budgets.outer
        exhausted = flight.life >= self._max_lives
        seen = f"last seen in phase {flight.phase} of life {flight.life}" if flight.life else "no runner reported it"
        return ev.InfraFailed(
            run=flight.admitted.run,
            step=flight.admitted.step,
            attempt=attempt,
            group=flight.admitted.group,
            session=ev.session_id(attempt, NO_LIFE),
            boundary=ev.Boundary.QUEUE,
            cause=ev.Cause.ATTEMPTS_EXHAUSTED if exhausted else ev.Cause.TIMEOUT,
            exception="OuterDeadline",
            detail=f"no outcome {seconds:g} s after its admission; {seen}",
        )


def _admitted(request: ev.RolloutRequested, wave: int, now: float) -> ev.RolloutAdmitted:
    return ev.RolloutAdmitted(
        run=request.run,
        step=request.step,
        attempt=request.attempt,
        group=request.group,
        index=request.index,
        task=request.task,
        digest=request.digest,
        budgets=request.budgets,
        wave=wave,
        admitted=now,
        purpose=request.purpose,
    )
