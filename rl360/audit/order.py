"""The journal itself: no event is missing, none stands there twice with another content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from rl360.audit.finding import Finding
from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.blobs import digest_of
from rl360.bus.codec import Recorded, encode

_ONCE: Final = (ev.StepOpened, ev.TurnCompleted, ev.TrajectoryMerged, ev.GroupDecided, ev.StepTrained, ev.StepClosed)
"""Facts and decisions that are made once. Of terminal outcomes S16 says which one counts."""


class OrderCheck:
    def __init__(self) -> None:
        self._last: int | None = None
        self._held: dict[str, bytes] = {}  # message id -> digest of the content

    def on(self, recorded: Recorded) -> Iterator[Finding]:
        if self._last is not None and recorded.seq != self._last + 1:
            text = f"event {recorded.seq} follows event {self._last}: the journal is not whole"
            yield Finding(rule="journal", about=recorded.event.run, text=text, seq=recorded.seq)
        self._last = recorded.seq
        yield from self._same(recorded)

    def _same(self, recorded: Recorded) -> Iterator[Finding]:
        if not isinstance(recorded.event, _ONCE):
            return
        name = subjects.msg_id(recorded.event)
        content = digest_of(encode(recorded.event)).encode()
        if self._held.setdefault(name, content) != content:
            yield Finding(rule="journal", about=name, text="stands in the journal twice, with different contents", seq=recorded.seq)

    def end(self) -> Iterable[Finding]:
        return ()
