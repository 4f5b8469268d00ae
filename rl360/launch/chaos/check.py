"""What a run that was struck must still be, told from its journal alone: nothing lost, nothing done twice. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from rl360.bus import events as ev
from rl360.bus.codec import Recorded


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """`lost`, `double`, `missing_steps` and `double_steps` must be empty; the rest tells how hard the run was hit."""

    attempts: int
    lost: tuple[str, ...]  # requested, without a terminal outcome
    double: tuple[str, ...]  # with more than one
    unasked: tuple[str, ...]  # an outcome that nobody requested
    missing_steps: tuple[int, ...]  # neither trained nor skipped
    double_steps: tuple[int, ...]
    infra: dict[str, int]
    later_lives: int  # outcomes of a second or later life
    rewound: int
    restarts: int
    pushes: int
    failed_pushes: int  # results of engines that missed one
    slowest_push: float  # seconds

    def wrong(self) -> dict[str, tuple[str, ...] | tuple[int, ...]]:
        """What of it must be empty and is not."""
        must = {name: getattr(self, name) for name in ("lost", "double", "unasked", "missing_steps", "double_steps")}
        return {name: value for name, value in must.items() if value}


def tally(records: Sequence[Recorded], steps: int) -> Tally:
    """The tally of a finished run of `steps` steps."""
    events = [r.event for r in records]
    requested = {e.attempt for e in events if isinstance(e, ev.RolloutRequested)}
    outcomes = [e for e in events if isinstance(e, ev.VerifierResult | ev.InfraFailed)]
    counts = Counter(e.attempt for e in outcomes)
    pushes = [e for e in events if isinstance(e, ev.WeightsPushed)]
    trained = Counter(e.step for e in events if isinstance(e, ev.StepTrained))
    return Tally(
        attempts=len(requested),
        lost=tuple(sorted(requested - set(counts))),
        double=tuple(sorted(a for a, n in counts.items() if n > 1)),
        unasked=tuple(sorted(set(counts) - requested)),
        missing_steps=tuple(s for s in range(steps) if s not in trained),
        double_steps=tuple(sorted(s for s, n in trained.items() if n > 1)),
        infra=dict(Counter(f"{e.boundary}/{e.cause}" for e in outcomes if isinstance(e, ev.InfraFailed))),
        later_lives=sum(ev.life_of(e.session) > 1 for e in outcomes),
        rewound=sum(isinstance(e, ev.JournalRewound) for e in events),
        restarts=sum(isinstance(e, ev.WorkerRestarted) for e in events),
        pushes=len(pushes),
        failed_pushes=sum(not r.ok for e in pushes for r in e.results),
        slowest_push=max((e.seconds for e in pushes), default=0.0),
    )
