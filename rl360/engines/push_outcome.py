"""What a push did, and the events that say so."""

from __future__ import annotations

from dataclasses import dataclass

from rl360.bus import events as ev
from rl360.engines.plan import PushPlan


@dataclass(frozen=True, kw_only=True)
class PushOutcome:
    """What a push did. `built`: the plans that were made for it; `plan`: the one that it ended with."""

    version: int
    attempt: int
    plan: PushPlan
    built: tuple[PushPlan, ...]
    checksum: str
    results: tuple[ev.PushResult, ...]
    pause_seconds: float  # the longest that any engine that holds the version stood still
    seconds: float

    def events(self, run: str, step: int) -> list[ev.Event]:
        """`PlanBuilt` for each new plan, then `WeightsPushed`."""
        pushed = ev.WeightsPushed(
            run=run,
            step=step,
            version=self.version,
            plan=self.plan.digest,
            path=self.plan.path,
            attempt=self.attempt,
            checksum=self.checksum,
            results=self.results,
            pause_seconds=self.pause_seconds,
            seconds=self.seconds,
        )
        return [*(plan.event(run, step) for plan in self.built), pushed]
