"""S14, S18, S19, S24: every group decided again from the events before it; S23: every closed step counted again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rl360.audit.finding import Finding
from rl360.bus import events as ev
from rl360.bus.codec import Recorded, encode
from rl360.config import ConfigError, parse
from rl360.trainer.group_filter import attempts_of
from rl360.trainer.groups import GroupContext, Rules, decide_group
from rl360.trainer.metrics import StepTally, belongs
from rl360.trainer.outcomes import Outcomes


class DecisionCheck:
    def __init__(self) -> None:
        self._rules = Rules()
        self._outcomes = Outcomes()
        self._opened: dict[tuple[ev.Purpose, int], ev.StepOpened] = {}
        self._tallies: dict[tuple[ev.Purpose, int], StepTally] = {}
        self._trained: dict[int, int] = {}  # step -> version after it

    def on(self, recorded: Recorded) -> Iterator[Finding]:
        event = recorded.event
        self._outcomes.on(recorded)
        if isinstance(event, ev.RunStarted):
            yield from self._started(recorded.seq, event)
        elif isinstance(event, ev.StepOpened):
            self._opened.setdefault((event.purpose, event.step), event)
            self._tallies.setdefault((event.purpose, event.step), StepTally(event))
        elif isinstance(event, ev.GroupDecided):
            yield from self._decided(recorded.seq, event)
        elif isinstance(event, ev.StepClosed):
            yield from self._closed(recorded.seq, event)
        if (tally := self._tallies.get((belongs(event), event.step))) is not None:
            tally.add(event)
        if isinstance(event, ev.StepTrained):
            self._trained.setdefault(event.step, event.version)

    def end(self) -> Iterable[Finding]:
        return ()

    def _started(self, seq: int, event: ev.RunStarted) -> Iterator[Finding]:
        try:
            self._rules = Rules.of(parse(event.config))
        except ConfigError as e:
            yield Finding(rule="journal", about=event.run, text=f"the recorded recipe can't be read: {e}", seq=seq)

    def _decided(self, seq: int, decided: ev.GroupDecided) -> Iterator[Finding]:
        about = f"step {decided.step} group {decided.group}"
        opened = self._opened.get((decided.purpose, decided.step))
        spec = next((g for g in opened.groups if g.group == decided.group), None) if opened else None
        if opened is None or spec is None:
            yield Finding(rule="S18", about=about, text="decided, but no step opened with it", seq=seq)
            return
        outcomes = [self._outcomes.complete(a) for a in attempts_of(opened, spec)]
        complete = [o for o in outcomes if o is not None]
        trained_on = self._trained_on(opened)
        if len(complete) < spec.attempts or trained_on is None:
            yield Finding(rule="S18", about=about, text="decided before everything it depends on was known", seq=seq)
            return
        again = decide_group(spec, complete, self._rules, GroupContext(decided.run, decided.step, trained_on, decided.purpose))
        if encode(again) != encode(decided):
            yield Finding(rule="S18", about=about, text=_difference(decided, again), seq=seq)

    def _trained_on(self, opened: ev.StepOpened) -> int | None:
        if opened.purpose is ev.Purpose.EVAL or opened.step == 0:
            return opened.version
        return self._trained.get(opened.step - 1)

    def _closed(self, seq: int, closed: ev.StepClosed) -> Iterator[Finding]:
        tally = self._tallies.get((closed.purpose, closed.step))
        about = f"step {closed.step} ({closed.purpose})"
        if tally is None or not tally.complete:
            yield Finding(rule="S23", about=about, text="closed before all of its groups were decided", seq=seq)
        elif (again := tally.closed(skipped=closed.skipped, why=closed.why)) != closed:
            yield Finding(rule="S23", about=about, text=f"closed with other counts: {_fields(closed, again)}", seq=seq)


def _difference(recorded: ev.GroupDecided, again: ev.GroupDecided) -> str:
    """What a second decision from the same events says differently."""
    parts = [_fields(recorded, again)]
    for a, b in zip(recorded.attempts, again.attempts, strict=False):
        if encode_attempt(a) != encode_attempt(b):
            parts.append(f"{b.attempt}: {_fields(a, b)}")
    return "decided again, it differs: " + "; ".join(p for p in parts if p)


def encode_attempt(decision: ev.AttemptDecision) -> tuple[object, ...]:
    return tuple(repr(getattr(decision, name)) for name in decision.__struct_fields__)


def _fields(recorded: object, again: object) -> str:
    names: tuple[str, ...] = getattr(recorded, "__struct_fields__", ())
    pairs = ((n, getattr(recorded, n), getattr(again, n)) for n in names if n != "attempts")
    return ", ".join(f"{n} {old!r}, not {new!r}" for n, old, new in pairs if repr(old) != repr(new))
