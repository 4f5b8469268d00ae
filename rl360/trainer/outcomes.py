"""What became of each attempt: its first terminal outcome in journal order, and the merged samples behind it (S16).

The one place that says which outcome counts; the filter, the trainer, the metrics and the audit all fold it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl360.bus import events as ev
from rl360.bus.codec import Recorded

Terminal = ev.VerifierResult | ev.InfraFailed

OUTCOME_TYPES: tuple[type[ev.Event], ...] = (ev.VerifierResult, ev.InfraFailed, ev.TrajectoryMerged)


@dataclass(frozen=True)
class AttemptOutcome:
    """An attempt that is over. `merged`: its samples by branch, of the session that the outcome names; () for a failure."""

    attempt: str
    terminal: Terminal
    merged: tuple[ev.TrajectoryMerged, ...] = ()

    @property
    def sampled(self) -> int:
        """Tokens the policy sampled, over all branches."""
        return sum(m.sampled for m in self.merged)


class Outcomes:
    """Fold of `OUTCOME_TYPES`, keyed by attempt."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, Terminal]] = {}
        self._merged: dict[str, dict[int, ev.TrajectoryMerged]] = {}  # by session

    def on(self, recorded: Recorded) -> ev.LateOutcome | None:
        """Fold one event. A terminal outcome after the first one changes nothing and is said to be late (S16)."""
        event = recorded.event
        if isinstance(event, ev.TrajectoryMerged):
            self._merged.setdefault(event.session, {}).setdefault(event.branch, event)
        elif isinstance(event, ev.VerifierResult | ev.InfraFailed):
            seq, first = self._first.setdefault(event.attempt, (recorded.seq, event))
            if seq != recorded.seq:
                return _late(event, seq, first)
        return None

    def terminal(self, attempt: str) -> Terminal | None:
        return self._first[attempt][1] if attempt in self._first else None

    def complete(self, attempt: str) -> AttemptOutcome | None:
        """The outcome with all its samples, or None while something of it is still to come."""
        terminal = self.terminal(attempt)
        if terminal is None or isinstance(terminal, ev.InfraFailed):
            return None if terminal is None else AttemptOutcome(attempt, terminal)
        branches = self._merged.get(terminal.session, {})
        merged = tuple(branches[b] for b in sorted(branches))
        if not merged or len(merged) < max(m.branches for m in merged):
            return None
        return AttemptOutcome(attempt, terminal, merged)

    def forget_samples(self, attempt: str) -> None:
        """Drop what a decided attempt no longer needs; late outcomes are still recognised."""
        terminal = self.terminal(attempt)
        if terminal is not None:
            self._merged.pop(terminal.session, None)


def _late(event: Terminal, first_seq: int, first: Terminal) -> ev.LateOutcome:
    same = type(event) is type(first) and event.session == first.session
    kind = type(event).__name__ + (" again" if same else "")
    return ev.LateOutcome(
        run=event.run, step=event.step, attempt=event.attempt, group=event.group, session=event.session, kind=kind, first_seq=first_seq
    )
