"""The view of a run: a fold over its events. The terminal table, the summary and the dashboard show what it holds.

Pure: it is given events and never looks at a clock; who shows it passes the time in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.trainer.metrics import StepMetrics, StepTally, belongs


class Stage(StrEnum):
    """Where an attempt is, in order."""

    REQUESTED = "requested"
    ADMITTED = "admitted"
    SETUP = "setup"
    AGENT = "agent"
    VERIFY = "verify"
    INFRA = "infra"
    VERIFIED = "verified"
    DECIDED = "decided"


_AFTER = {ev.Phase.QUEUE: Stage.SETUP, ev.Phase.SETUP: Stage.AGENT, ev.Phase.AGENT: Stage.VERIFY}


@dataclass
class StepView:
    """One step of training, or one evaluation. Its numbers are those of S23 (`rl360.trainer.metrics`)."""

    opened: ev.StepOpened
    opened_at: float
    tally: StepTally
    stages: dict[str, Stage] = field(default_factory=dict[str, Stage])
    trained: ev.StepTrained | None = None
    push: ev.WeightsPushed | None = None
    closed_at: float | None = None
    faults: dict[str, str] = field(default_factory=dict[str, str])  # by the recipe's plan: target -> kind
    _metrics: StepMetrics | None = None

    @property
    def step(self) -> int:
        return self.opened.step

    @property
    def purpose(self) -> ev.Purpose:
        return self.opened.purpose

    @property
    def finished(self) -> bool:
        """It has trained (its push may still be due), or was closed without."""
        return self.trained is not None or self.closed_at is not None

    @property
    def counts(self) -> Counter[Stage]:
        return Counter(self.stages.values())

    @property
    def metrics(self) -> StepMetrics:
        """Of what has happened so far; computed when asked, once for each change."""
        if self._metrics is None:
            self._metrics = self.tally.metrics()
        return self._metrics

    def move(self, attempt: str, stage: Stage) -> None:
        """An attempt reached a stage; the first terminal one stays (S16)."""
        if self.stages.get(attempt) not in _TERMINAL:
            self.stages[attempt] = stage

    def add(self, event: ev.AnyEvent) -> None:
        self.tally.add(event)
        self._metrics = None

    @property
    def cache_hit(self) -> tuple[float, float] | None:
        """(hit, best possible) as shares of all prompt tokens."""
        m = self.metrics
        return (m.cached_tokens / m.prompt_tokens, m.best_cached / m.prompt_tokens) if m.prompt_tokens else None


@dataclass
class RunView:
    """A whole run so far."""

    run: str = ""
    config: dict[str, object] = field(default_factory=dict[str, object])
    started: float | None = None
    finished: ev.RunFinished | None = None
    steps: dict[tuple[ev.Purpose, int], StepView] = field(default_factory=dict[tuple[ev.Purpose, int], StepView])
    engines: dict[str, str] = field(default_factory=dict[str, str])
    version: int = -1
    restarts: Counter[str] = field(default_factory=Counter[str])
    rewound: list[ev.JournalRewound] = field(default_factory=list[ev.JournalRewound])
    unenforced: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """(node, limit) -> why."""
    late: int = 0
    last: float = 0.0

    def on(self, recorded: Recorded) -> None:
        """Fold one event."""
        self.last = recorded.time
        event = recorded.event
        match event:
            case ev.RunStarted():
                self.run, self.config = event.run, event.config
                self.started = self.started or recorded.time
                self.finished = None
            case ev.RunFinished():
                self.finished = event
            case ev.StepOpened():
                self.steps.setdefault((event.purpose, event.step), StepView(event, recorded.time, StepTally(event)))
            case ev.WeightsPushed():
                self._pushed(event)
            case ev.StepTrained():
                if step := self.steps.get((ev.Purpose.TRAIN, event.step)):
                    step.trained = event
                    step.add(event)
            case ev.EngineJoined() | ev.EngineReady() | ev.EngineLost() | ev.EngineFenced():
                self.engines[event.generation] = type(event).__name__.removeprefix("Engine").lower()
            case ev.WorkerRestarted():
                self.restarts[event.worker] += 1
            case ev.JournalRewound():
                self.rewound.append(event)
            case ev.LimitNotEnforced():
                self.unenforced[event.node, event.limit] = event.why
            case ev.LateOutcome():
                self.late += 1
            case _:
                self._of_a_step(event, recorded.time)

    def _pushed(self, event: ev.WeightsPushed) -> None:
        self.version = max(self.version, event.version)
        for step in self.steps.values():
            if step.trained and not step.trained.skipped and step.trained.version == event.version and step.push is None:
                step.push = event

    def _of_a_step(self, event: ev.AnyEvent, time: float) -> None:
        step = self.steps.get((belongs(event), event.step))
        if step is None:
            return
        step.add(event)
        match event:
            case ev.RolloutRequested():
                step.stages.setdefault(event.attempt, Stage.REQUESTED)
            case ev.RolloutAdmitted():
                step.move(event.attempt, Stage.ADMITTED)
            case ev.RolloutPhase():
                if event.end is not None and event.phase in _AFTER:
                    step.move(event.attempt, _AFTER[event.phase])
            case ev.VerifierResult():
                step.move(event.attempt, Stage.VERIFIED)
            case ev.InfraFailed():
                step.move(event.attempt, Stage.INFRA)
            case ev.GroupDecided():
                for a in event.attempts:
                    if step.stages.get(a.attempt) is Stage.VERIFIED:
                        step.stages[a.attempt] = Stage.DECIDED
            case ev.FaultInjected():
                step.faults[event.target] = event.kind
            case ev.StepClosed():
                step.closed_at = time
            case _:
                pass

    def train_steps(self) -> list[StepView]:
        return [s for (p, _), s in sorted(self.steps.items()) if p is ev.Purpose.TRAIN]

    def finished_steps(self) -> list[StepView]:
        return [s for s in self.train_steps() if s.finished]

    def evals(self) -> list[StepView]:
        """Held-out evaluations with all groups decided."""
        return [s for (p, _), s in sorted(self.steps.items()) if p is ev.Purpose.EVAL and s.tally.complete]


_TERMINAL = {Stage.INFRA, Stage.VERIFIED, Stage.DECIDED}
