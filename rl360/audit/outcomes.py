"""S12 and S16: every requested attempt ends once, and a reward has a verifier's receipt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from rl360.audit.finding import Finding
from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.trainer.outcomes import Terminal


class OutcomeCheck:
    def __init__(self) -> None:
        self._requested: dict[tuple[ev.Purpose, int], set[str]] = {}
        self._known: set[str] = set()
        self._first: dict[str, tuple[int, Terminal]] = {}

    def on(self, recorded: Recorded) -> Iterator[Finding]:
        match recorded.event:
            case ev.RolloutRequested() as request:
                self._requested.setdefault((request.purpose, request.step), set()).add(request.attempt)
                self._known.add(request.attempt)
            case ev.VerifierResult() | ev.InfraFailed() as outcome:
                yield from self._outcome(recorded.seq, outcome)
            case ev.LateOutcome() as late:
                yield from self._late(recorded.seq, late)
            case ev.GroupDecided(kept=True) as decided:
                yield from self._rewarded(recorded.seq, decided)
            case ev.StepClosed() as closed:
                yield from self._closed(recorded.seq, closed)
            case _:
                pass

    def end(self) -> Iterable[Finding]:
        return ()

    def _outcome(self, seq: int, outcome: Terminal) -> Iterator[Finding]:
        if outcome.attempt not in self._known:
            yield Finding(rule="S16", about=outcome.attempt, text="has an outcome, but nobody requested it", seq=seq)
        self._first.setdefault(outcome.attempt, (seq, outcome))
        if isinstance(outcome, ev.VerifierResult):
            for text in _wrong_with(outcome):
                yield Finding(rule="S12", about=outcome.attempt, text=text, seq=seq)

    def _late(self, seq: int, late: ev.LateOutcome) -> Iterator[Finding]:
        first = self._first.get(late.attempt)
        if first is None or first[0] != late.first_seq:
            yield Finding(
                rule="S16", about=late.attempt, text=f"called late after event {late.first_seq}, which is not its first outcome", seq=seq
            )

    def _rewarded(self, seq: int, decided: ev.GroupDecided) -> Iterator[Finding]:
        """A reward that trains is the one that a verifier wrote."""
        for a in decided.attempts:
            if a.advantage is None:
                continue
            _, first = self._first.get(a.attempt, (0, None))
            wrote = first.reward if isinstance(first, ev.VerifierResult) else None
            if wrote is None or wrote != a.raw_reward:
                text = f"trains on reward {a.raw_reward}; its verifier wrote {'none' if wrote is None else wrote}"
                yield Finding(rule="S12", about=a.attempt, text=text, seq=seq)

    def _closed(self, seq: int, closed: ev.StepClosed) -> Iterator[Finding]:
        for attempt in sorted(self._requested.get((closed.purpose, closed.step), set()) - self._first.keys()):
            yield Finding(rule="S16", about=attempt, text="has no terminal outcome although its step is closed", seq=seq)


def _wrong_with(result: ev.VerifierResult) -> Iterator[str]:
    receipt = result.receipt
    if not (math.isfinite(result.reward) and result.low <= result.reward <= result.high):
        yield f"reward {result.reward} is not a finite number in [{result.low:g}, {result.high:g}]"
    if not (receipt.file and receipt.file_digest and receipt.verifier_digest):
        yield "the receipt does not say which file and which verifier"
    if receipt.written_at < receipt.agent_dead_at:
        yield "the reward was written before the agent was dead (S17)"
