"""Everything the journal says about one training step, folded once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.config import Config, ConfigError, parse
from rl360.journal.pruned import Pruned
from rl360.trainer.group_filter import attempts_of
from rl360.trainer.metrics import StepTally, belongs
from rl360.trainer.outcomes import AttemptOutcome, Outcomes


class ReplayError(ValueError):
    """The journal does not hold what a replay needs."""


@dataclass(frozen=True)
class Engines:
    """Engine and worker events between a step's opening and its push."""

    joined: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict[str, str])  # generation: cause
    fenced: Mapping[str, str] = field(default_factory=dict[str, str])
    restarts: Mapping[str, str] = field(default_factory=dict[str, str])  # worker: cause


@dataclass(frozen=True)
class StepFacts:
    """Of one training step. What has not happened yet is None or empty."""

    run: str
    step: int
    config: Config
    opened: ev.StepOpened
    trained_on: int | None  # version that the optimizer step starts from; None: the step before is not trained
    outcomes: Outcomes
    decided: Mapping[int, ev.GroupDecided]
    tally: StepTally
    turns: tuple[ev.TurnCompleted, ...]
    trained: ev.StepTrained | None
    closed: ev.StepClosed | None
    pushes: tuple[ev.WeightsPushed, ...]
    plans: Mapping[str, ev.PlanBuilt]
    late: int
    pruned: bool  # retention removed its blobs and checkpoints; its decisions stand in events, which stay
    engines: Engines
    seqs: Mapping[str, int]  # of decisions, by what they decide: "group 3", "trained", "closed"
    times: tuple[float, float]  # unix seconds of the step's first and last event

    def attempts(self, spec: ev.GroupSpec) -> list[AttemptOutcome | None]:
        """Outcomes of a group's attempts; None for one that is not over."""
        return [self.outcomes.complete(a) for a in attempts_of(self.opened, spec)]

    @property
    def requested(self) -> int:
        return sum(g.attempts for g in self.opened.groups)


def facts_of(records: Iterable[Recorded], step: int) -> StepFacts:
    """Fold the journal, or the part of it that is about `step`. Raises ReplayError when that step was never opened."""
    fold = _Fold(step)
    for record in records:
        fold.on(record)
    return fold.facts()


class _Fold:
    def __init__(self, step: int) -> None:
        self._step = step
        self._config: Config | None = None
        self._run = ""
        self._opened: ev.StepOpened | None = None
        self._tally: StepTally | None = None
        self._before: ev.StepTrained | None = None
        self._outcomes = Outcomes()
        self._decided: dict[int, ev.GroupDecided] = {}
        self._turns: list[ev.TurnCompleted] = []
        self._trained: ev.StepTrained | None = None
        self._closed: ev.StepClosed | None = None
        self._pushes: list[ev.WeightsPushed] = []
        self._plans: dict[str, ev.PlanBuilt] = {}
        self._late = 0
        self._pruned = Pruned()
        self._around: list[Recorded] = []
        self._seqs: dict[str, int] = {}
        self._times: list[float] = []

    def on(self, recorded: Recorded) -> None:
        event = recorded.event
        self._pruned.on(recorded)
        match event:
            case ev.RunStarted():
                self._started(event)
            case ev.PlanBuilt():
                self._plans[event.plan] = event
            case ev.EngineJoined() | ev.EngineLost() | ev.EngineFenced() | ev.WorkerRestarted():
                self._around.append(recorded)
            case ev.StepTrained() if event.step == self._step - 1:
                self._before = self._before or event
            case _:
                pass
        if event.step == self._step and belongs(event) is ev.Purpose.TRAIN:
            self._times.append(recorded.time)
            self._of_the_step(recorded)

    def _started(self, event: ev.RunStarted) -> None:
        try:
            self._config = parse(event.config)
        except ConfigError as e:
            raise ReplayError(f"the recipe that the journal of {event.run} records can't be read: {e}") from None
        self._run = event.run

    def _of_the_step(self, recorded: Recorded) -> None:
        event = recorded.event
        self._outcomes.on(recorded)
        match event:
            case ev.StepOpened():
                self._opened = self._opened or event
                self._tally = self._tally or StepTally(event)
            case ev.TurnCompleted():
                self._turns.append(event)
            case ev.GroupDecided():
                self._decided.setdefault(event.group, event)
                self._seqs.setdefault(f"group {event.group}", recorded.seq)
            case ev.StepTrained():
                self._trained = self._trained or event
                self._seqs.setdefault("trained", recorded.seq)
            case ev.StepClosed():
                self._closed = self._closed or event
                self._seqs.setdefault("closed", recorded.seq)
            case ev.WeightsPushed():
                self._pushes.append(event)
            case ev.LateOutcome():
                self._late += 1
            case _:
                pass
        if self._tally is not None:
            self._tally.add(event)

    def facts(self) -> StepFacts:
        if self._config is None:
            raise ReplayError("the journal does not begin with RunStarted: it is not the journal of a run, or not whole")
        if self._opened is None or self._tally is None:
            raise ReplayError(f"training step {self._step} is not in the journal of run {self._run} (`rl360 journal ls` lists its steps)")
        first = self._step == 0
        return StepFacts(
            run=self._run,
            step=self._step,
            config=self._config,
            opened=self._opened,
            trained_on=self._opened.version if first else self._before.version if self._before else None,
            outcomes=self._outcomes,
            decided=self._decided,
            tally=self._tally,
            turns=tuple(self._turns),
            trained=self._trained,
            closed=self._closed,
            pushes=tuple(self._pushes),
            plans=self._plans,
            late=self._late,
            pruned=self._pruned.covers(self._step),
            engines=_engines(self._around, min(self._times), max(self._times)),
            seqs=self._seqs,
            times=(min(self._times), max(self._times)),
        )


def _engines(around: Iterable[Recorded], start: float, end: float) -> Engines:
    events = [r.event for r in around if start <= r.time <= end]
    return Engines(
        joined=tuple(e.generation for e in events if isinstance(e, ev.EngineJoined)),
        lost={e.generation: e.cause for e in events if isinstance(e, ev.EngineLost)},
        fenced={e.generation: e.cause for e in events if isinstance(e, ev.EngineFenced)},
        restarts={e.worker: e.cause for e in events if isinstance(e, ev.WorkerRestarted)},
    )
