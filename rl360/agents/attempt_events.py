"""What one life of an attempt says in the journal: no clock and no I/O of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl360.agents.clocks import PhaseClock, budget
from rl360.agents.outcomes import InfraError
from rl360.agents.verify import Verdict
from rl360.bus.events import AgentEnd, InfraFailed, RolloutAdmitted, RolloutPhase, StartRetried, VerifierResult


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """Who speaks: the life `session` of an attempt, on a runner's `node`."""

    run: str
    admitted: RolloutAdmitted
    session: str
    node: str

    @property
    def _about(self) -> dict[str, Any]:
        a = self.admitted
        return {"run": self.run, "step": a.step, "attempt": a.attempt, "group": a.group, "session": self.session, "node": self.node}

    def phase(self, clock: PhaseClock, end: float | None) -> RolloutPhase:
        """A phase began (no `end`) or ended (unix seconds)."""
        return RolloutPhase(**self._about, phase=clock.phase, start=clock.started, end=end)

    def retried(self, error: InfraError, tries: int, due: float) -> StartRetried:
        """A start failed for the `tries`-th time and is tried again at `due` (unix seconds)."""
        return StartRetried(
            **self._about,
            tries=tries,
            boundary=error.boundary,
            cause=error.cause,
            exception=error.exception,
            detail=error.detail,
            due=due,
        )

    def verified(self, verdict: Verdict, agent_end: AgentEnd, teardown_error: str) -> VerifierResult:
        return VerifierResult(
            **self._about,
            reward=verdict.reward,
            low=verdict.low,
            high=verdict.high,
            receipt=verdict.receipt,
            exit_status=verdict.receipt.exit_status,
            agent_end=agent_end,
            teardown_error=teardown_error,
            steps=verdict.steps,
        )

    def failed(
        self, error: InfraError, clock: PhaseClock, now: float, *, image: str, agent_end: AgentEnd | None, teardown_error: str
    ) -> InfraFailed:
        """`now`: tells whether the phase's clock had run out as well."""
        phase = clock.ran_out(now)
        late = "" if phase is None else f" (after the {phase} phase's {budget(self.admitted.budgets, phase):g} s)"
        return InfraFailed(
            **self._about,
            boundary=error.boundary,
            cause=error.cause,
            exception=error.exception,
            detail=error.detail + late,
            image=image,
            agent_end=agent_end,
            teardown_error=teardown_error,
        )
