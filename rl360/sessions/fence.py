"""Which engine generations may no longer answer: membership fenced them, or lost them. Their replies are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from rl360.bus import events as ev
from rl360.bus.client import Bus
from rl360.bus.codec import Recorded

FOLDS: Final[Sequence[type[ev.Event]]] = (ev.EngineFenced, ev.EngineLost)


class Fence:
    """A fold over membership's events. A generation never comes back: a restarted engine is a new one."""

    def __init__(self) -> None:
        self._out: set[str] = set()

    def on(self, recorded: Recorded) -> None:
        event = recorded.event
        if isinstance(event, ev.EngineFenced | ev.EngineLost):
            self._out.add(event.generation)

    def refuses(self, generation: str) -> bool:
        return generation in self._out


async def keep(fence: Fence, bus: Bus, stop: asyncio.Event) -> None:
    """Fold until `stop`."""
    async for record in bus.follow(types=FOLDS, stop=stop):
        fence.on(record)
