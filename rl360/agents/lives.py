"""What the journal says about an attempt's earlier lives. The shared consumer's own count is no witness after a crash:

nats-server writes down later what it gave to whom, and a resumed run starts with a new consumer. So an attempt that was
admitted before its runner started, or before the server did, may have had lives, and an outcome, that its delivery knows
nothing of; and its runner may be alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rl360.bus import events as ev
from rl360.bus.client import Bus, Delivery

_TYPES: Final = (ev.SessionOpened, ev.RolloutPhase, ev.VerifierResult, ev.InfraFailed)


@dataclass(frozen=True)
class Past:
    """Of one attempt: whether it has its outcome, and how many lives it had, and how many of them since the run was last started."""

    over: bool = False
    lives: int = 0
    recent: int = 0

    def held(self, deliveries: int) -> bool:
        """Whether its newest life may go on: its runner was not given up, for the consumer doesn't know of it any more."""
        return not self.over and self.recent >= deliveries


class Lives:
    """`seq`: the journal was read up to here when the runner started; `started`: when the run was last started (unix seconds)."""

    def __init__(self, bus: Bus, seq: int, started: float, over: frozenset[str]) -> None:
        self._bus, self._seq, self._over = bus, seq, over
        self._reconnects = bus.reconnects
        self.started = started

    @classmethod
    async def read(cls, bus: Bus) -> Lives:
        """Read the journal once: most of what a new consumer shares out again is over."""
        seq, started, over = await bus.last_seq(), 0.0, set[str]()
        async for recorded in bus.replay(types=[ev.RunStarted, ev.VerifierResult, ev.InfraFailed], end=seq):
            event = recorded.event
            if isinstance(event, ev.RunStarted):
                started = recorded.time
            elif isinstance(event, ev.VerifierResult | ev.InfraFailed):
                over.add(event.attempt)
        return cls(bus, seq, started, frozenset(over))

    async def past(self, delivery: Delivery) -> Past:
        """The past of the attempt that was delivered; the journal is asked where it may have one."""
        if self._reconnects != self._bus.reconnects:
            self._reconnects, self._seq = self._bus.reconnects, await self._bus.last_seq()
        recorded = delivery.recorded
        admitted = recorded.event
        assert isinstance(admitted, ev.RolloutAdmitted)
        if admitted.attempt in self._over:
            return Past(over=True)
        if recorded.deliveries == 1 and recorded.seq > self._seq:
            return Past()
        return await self._ask(admitted)

    async def _ask(self, admitted: ev.RolloutAdmitted) -> Past:
        lives, recent, over = 0, set[int](), False
        async for recorded in self._bus.replay(types=_TYPES, step=admitted.step, group=admitted.group):
            event = recorded.event
            if isinstance(event, ev.OfSession) and event.attempt == admitted.attempt:
                lives = max(lives, life := ev.life_of(event.session))
                if recorded.time >= self.started:
                    recent.add(life)
                over |= isinstance(event, ev.VerifierResult | ev.InfraFailed)
        return Past(over, lives, len(recent))
