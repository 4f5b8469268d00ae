"""How a worker lives: what it is given, and how a folding worker reads, decides and publishes.

A `Machine` is the pure core: it folds the journal event by event and says which events follow. `react` is its shell.
On a restart the machine folds the journal from its start and says the same events again; those that the journal
already holds are recognised by their message id, so only what is missing is published.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.address import Addresses, Secrets
from rl360.bus.client import Bus
from rl360.bus.codec import Recorded
from rl360.config import Config


@dataclass(frozen=True)
class WorkerContext:
    """All that a worker is given. It returns soon after `stop` is set."""

    kind: str
    index: int
    config: Config
    dir: Path
    bus: Bus
    addresses: Addresses
    secrets: Secrets
    stop: asyncio.Event
    log: logging.Logger
    host: str = "127.0.0.1"  # under which other workers reach this one

    @property
    def listen(self) -> str:
        """Address to listen on for them."""
        return self.host if self.host == "127.0.0.1" else "0.0.0.0"

    @property
    def name(self) -> str:
        return f"{self.kind}{self.index}"


class Machine(Protocol):
    """The pure core of a folding worker: deterministic, no I/O, no clock of its own."""

    def on(self, recorded: Recorded) -> Sequence[ev.Event]:
        """Fold one event; say which events follow from it."""
        ...


async def react(
    bus: Bus,
    machine: Machine,
    *,
    types: Sequence[type[ev.Event]],
    stop: asyncio.Event,
    tick: float = 0.0,
    on_tick: Callable[[float], Sequence[ev.Event]] | None = None,
) -> None:
    """Run a machine over the journal until `stop` is set. `types` must include the types that it emits.

    `on_tick(now)` is for what is decided by time (deadlines, waves): called every `tick` seconds when caught up, with unix seconds.
    """
    outbox = Outbox(bus)
    async with bus.reader(types=types) as reader:
        next_tick = 0.0
        while not stop.is_set():
            record = await reader.next(timeout=tick or 0.5)
            if record is not None:
                outbox.seen(record.event)
                outbox.add(machine.on(record))
            if not reader.caught_up:
                continue
            if on_tick is not None and (now := time.time()) >= next_tick:
                outbox.add(on_tick(now))
                next_tick = now + tick
            await outbox.flush()


class Outbox:
    """Decided events that the journal doesn't hold yet. An id is published once in a life."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._due: dict[str, ev.Event] = {}
        self._held: set[str] = set()

    def seen(self, event: ev.Event) -> None:
        """The journal holds this event."""
        key = subjects.msg_id(event)
        self._held.add(key)
        self._due.pop(key, None)

    def add(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            key = subjects.msg_id(event)
            if key not in self._held:
                self._due[key] = event

    async def flush(self) -> None:
        """Publish what is due, in order, and wait for the receipts."""
        if not self._due:
            return
        due, self._due = self._due, {}
        receipts = [await self._bus.submit(e) for e in due.values()]
        await asyncio.gather(*receipts)
        self._held.update(due)
