"""One clock a phase (S15). Pure: the time is passed in, and nothing here waits.

Not covered: waiting itself. Whoever waits asks for `left` and, when the wait ran out, `ran_out` says whose clock it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl360.bus.events import Budgets, Phase


def budget(budgets: Budgets, phase: Phase) -> float:
    """Seconds that a phase may take."""
    return float(getattr(budgets, phase.value))


@dataclass(frozen=True)
class PhaseClock:
    """The clock of the phase that an attempt is in, and its outer deadline. Times are unix seconds.

    >>> b = Budgets(queue=10, setup=5, agent=60, verify=20, collect=5, margin=3)
    >>> clock = PhaseClock.taken(b, admitted=100.0, up=90.0, now=104.0, life=1)
    >>> clock.enter(Phase.SETUP, 104.0).left(106.0)
    3.0
    >>> clock.enter(Phase.SETUP, 104.0).ran_out(109.0)
    <Phase.SETUP: 'setup'>
    """

    budgets: Budgets
    outer: float
    phase: Phase
    started: float
    used: float = 0.0  # of this phase's budget, by earlier steps of the task

    @classmethod
    def taken(cls, budgets: Budgets, *, admitted: float, up: float, now: float, life: int) -> PhaseClock:
        """The clock of one life of an attempt, in the queue phase.

        The first life has waited since `admitted`. A later life stands in for a runner that died: its queue starts
        when it is taken, since the attempt didn't wait in the queue while the dead runner held it. No clock ran before
        the run was `up`: after a resume, its time of rest is nobody's queue.
        """
        waiting = max(admitted, up)
        return cls(budgets=budgets, outer=waiting + budgets.outer, phase=Phase.QUEUE, started=waiting if life == 1 else now)

    def enter(self, phase: Phase, now: float, used: float = 0.0) -> PhaseClock:
        """The clock of the next phase; it starts now. The steps of a task share a phase's budget: `used` is gone already."""
        return replace(self, phase=phase, started=now, used=used)

    @property
    def deadline(self) -> float:
        """When this phase ends at the latest."""
        return min(self.started + budget(self.budgets, self.phase) - self.used, self.outer)

    def left(self, now: float) -> float:
        """Seconds left to this phase, never below 0."""
        return max(0.0, self.deadline - now)

    def ran_out(self, now: float) -> Phase | None:
        """The phase whose clock ran out, or None while there is time left."""
        return self.phase if now >= self.deadline else None
