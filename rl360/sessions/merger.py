"""The merger's decision: which attempts are finished, and what their samples are. Pure but for the two callables it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from rl360.bus import sample
from rl360.bus.codec import Recorded
from rl360.bus.events import Event, InfraFailed, RoutingDelta, SessionClosed, TrajectoryMerged, TurnCompleted, VerifierResult
from rl360.bus.payload import Payload
from rl360.bus.sample import Routing, Sample
from rl360.sessions.merge import Merged, Unpack, merge_session

Pack = Callable[[bytearray], Payload]

TYPES: Final[tuple[type[Event], ...]] = (TurnCompleted, RoutingDelta, SessionClosed, VerifierResult, InfraFailed, TrajectoryMerged)
"""What the merger folds, its own events included."""


_Folded = TurnCompleted | RoutingDelta | SessionClosed | VerifierResult | InfraFailed


class Pending(msgspec.Struct):
    """A session whose attempt isn't merged yet."""

    turns: dict[int, TurnCompleted] = {}
    deltas: dict[int, RoutingDelta] = {}
    closed: SessionClosed | None = None

    @property
    def complete(self) -> bool:
        return self.closed is not None and all(n in self.turns for n in range(1, self.closed.turns + 1))


class Merger:
    """Folds turns, closings and outcomes. An attempt is merged when its first outcome is a verdict (S16) and its session is whole.

    `done`: sessions whose samples the journal holds already, not merged again after a restart.
    An attempt without any turn gets one sample of no token, so that nobody waits for it; it can't train.
    """

    def __init__(self, *, pack: Pack, unpack: Unpack, replay: bool, done: frozenset[str] = frozenset()) -> None:
        self._pack, self._unpack, self._replay, self._done = pack, unpack, replay, done
        self._sample_buffer, self._routing_buffer = bytearray(), bytearray()
        self._sessions: dict[str, dict[str, Pending]] = {}  # attempt: session: what is known
        self._verdicts: dict[str, VerifierResult] = {}  # attempts that wait for the rest of their session
        self._over: set[str] = set()  # attempts that need nothing more

    def on(self, recorded: Recorded) -> Sequence[Event]:
        event = recorded.event
        if (
            not isinstance(event, TurnCompleted | RoutingDelta | SessionClosed | VerifierResult | InfraFailed)
            or event.attempt in self._over
        ):
            return ()
        if isinstance(event, InfraFailed):
            if event.attempt not in self._verdicts:
                self._end(event.attempt)
        elif isinstance(event, VerifierResult):
            self._verdicts.setdefault(event.attempt, event)
        else:
            self._fold(event)
        return self._ready(event.attempt)

    def _fold(self, event: TurnCompleted | RoutingDelta | SessionClosed) -> None:
        pending = self._sessions.setdefault(event.attempt, {}).setdefault(event.session, Pending())
        if isinstance(event, TurnCompleted):
            pending.turns.setdefault(event.turn, event)
        elif isinstance(event, RoutingDelta):
            pending.deltas.setdefault(event.turn, event)
        else:
            pending.closed = pending.closed or event

    def _ready(self, attempt: str) -> Sequence[Event]:
        verdict = self._verdicts.get(attempt)
        pending = self._sessions.get(attempt, {}).get(verdict.session) if verdict else None
        if verdict is None or pending is None or not pending.complete:
            return ()
        self._end(attempt)
        return () if verdict.session in self._done else self._merge(verdict, pending)

    def _end(self, attempt: str) -> None:
        self._over.add(attempt)
        self._sessions.pop(attempt, None)
        self._verdicts.pop(attempt, None)

    def _merge(self, verdict: VerifierResult, pending: Pending) -> list[Event]:
        merged = merge_session(list(pending.turns.values()), pending.deltas.values(), self._unpack, replay=self._replay)
        samples = merged or [_nothing(verdict.attempt)]
        return [self._event(verdict, m, len(samples)) for m in samples]

    def _event(self, verdict: VerifierResult, m: Merged, branches: int) -> TrajectoryMerged:
        return TrajectoryMerged(
            run=verdict.run,
            step=verdict.step,
            attempt=verdict.attempt,
            group=verdict.group,
            session=verdict.session,
            branch=m.sample.branch,
            tokens=len(m.sample),
            sampled=m.sampled,
            turns=m.turns,
            dropped_turns=m.dropped_turns,
            format_errors=m.format_errors,
            min_version=m.min_version,
            max_version=m.max_version,
            sample=self._packed(m.sample, self._sample_buffer),
            routing=None if m.routing is None else self._packed(m.routing, self._routing_buffer),
            branches=branches,
            cached_tokens=m.cached_tokens,
            best_cached=m.best_cached,
            prompt_tokens=m.prompt_tokens,
            cut_tokens=m.cut_tokens,
        )

    def _packed(self, value: Sample | Routing, buffer: bytearray) -> Payload:
        sample.encode_into(value, buffer)
        return self._pack(buffer)


def _nothing(attempt: str) -> Merged:
    none = np.zeros(0, np.int32)
    empty = sample.make(attempt=attempt, branch=0, ids=none, mask=np.zeros(0, np.uint8), logprobs=np.zeros(0, np.float32), versions=none)
    return Merged(
        sample=empty,
        routing=None,
        sampled=0,
        turns=0,
        dropped_turns=0,
        format_errors=0,
        min_version=-1,
        max_version=-1,
        cached_tokens=0,
        best_cached=0,
        prompt_tokens=0,
        cut_tokens=0,
    )
