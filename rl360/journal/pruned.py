"""Which steps' blobs retention has removed, from the journal alone. Pure."""

from __future__ import annotations

from rl360.bus import events as ev
from rl360.bus.codec import Recorded


class Pruned:
    """Fold of `BlobsPruned`."""

    def __init__(self) -> None:
        self._events: list[ev.BlobsPruned] = []

    def on(self, recorded: Recorded) -> None:
        if isinstance(recorded.event, ev.BlobsPruned):
            self._events.append(recorded.event)

    def covers(self, step: int) -> bool:
        """Whether blobs that only this step needs may be gone."""
        return any(e.first <= step <= e.last and step not in e.kept for e in self._events)
