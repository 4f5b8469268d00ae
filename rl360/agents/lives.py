"""What the journal says about an attempt's earlier lives. The shared consumer's own count is no witness after a crash:

nats-server writes down later what it gave to whom, and a resumed run starts with a new consumer. So an attempt that was
admitted before its runner started may have had lives, and an outcome, that its delivery knows nothing of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rl360.bus import events as ev
from rl360.bus.client import Bus, Delivery

_TYPES: Final = (ev.SessionOpened, ev.RolloutPhase, ev.VerifierResult, ev.InfraFailed)


@dataclass(frozen=True)
class Past:
    """Of one attempt: whether it has its outcome, and how many lives it had."""

    over: bool
    lives: int


NONE: Final = Past(over=False, lives=0)


class Lives:
    """`seq`: the journal was read up to here when the runner started; `started`: when the run was last started (unix seconds)."""

    def __init__(self, bus: Bus, seq: int, started: float, over: frozenset[str]) -> None:
        self._bus, self._seq, self._over = bus, seq, over
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
        recorded = delivery.recorded
        admitted = recorded.event
        assert isinstance(admitted, ev.RolloutAdmitted)
        if admitted.attempt in self._over:
            return Past(over=True, lives=0)
        if recorded.deliveries == 1 and recorded.seq > self._seq:
            return NONE
        return await self._ask(admitted)

    async def _ask(self, admitted: ev.RolloutAdmitted) -> Past:
        lives, over = 0, False
        async for recorded in self._bus.replay(types=_TYPES, step=admitted.step, group=admitted.group):
            event = recorded.event
            if isinstance(event, ev.OfSession) and event.attempt == admitted.attempt:
                lives = max(lives, ev.life_of(event.session))
                over |= isinstance(event, ev.VerifierResult | ev.InfraFailed)
        return Past(over, lives)
