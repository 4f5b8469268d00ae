"""The journal itself: whole, every message read, no fact there twice with another content, the recipe as its digest says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

from rl360.audit.finding import Finding
from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.blobs import digest_of
from rl360.bus.codec import Recorded, encode
from rl360.journal.source import Reading

_ONCE: Final = (ev.StepOpened, ev.TurnCompleted, ev.TrajectoryMerged, ev.GroupDecided, ev.StepTrained, ev.StepClosed)
"""Facts and decisions that are made once. Of terminal outcomes S16 says which one counts."""


class OrderCheck:
    def __init__(self, journal: Reading) -> None:
        self._whole = journal.steps is None
        self._malformed, self._unread = journal.malformed, journal.unread
        self._last = 0
        self._recipe: dict[str, Any] = {}
        self._held: dict[str, bytes] = {}  # message id -> digest of the content

    def on(self, recorded: Recorded) -> Iterator[Finding]:
        event, seq = recorded.event, recorded.seq
        if self._whole and any(missing not in self._unread for missing in range(self._last + 1, seq)):
            before = f"event {self._last}" if self._last else "nothing"
            yield Finding(rule="journal", about=event.run, text=f"event {seq} follows {before}: the journal is not whole", seq=seq)
        if not self._last and not isinstance(event, ev.RunStarted):
            yield Finding(rule="journal", about=event.run, text=f"begins with {type(event).__name__}, not with RunStarted", seq=seq)
        self._last = seq
        if isinstance(event, ev.RunStarted):
            yield from self._started(seq, event)
        elif isinstance(event, _ONCE):
            yield from self._same(seq, event)

    def _started(self, seq: int, event: ev.RunStarted) -> Iterator[Finding]:
        if digest_of(json.dumps(event.config, sort_keys=True).encode()) != event.config_digest:
            yield Finding(rule="journal", about=event.run, text="the recorded recipe is not the one that its digest names", seq=seq)
        if self._recipe and (key := changed(self._recipe, event.config)):
            yield Finding(rule="journal", about=event.run, text=f"was resumed with another recipe: {key} is not what it was", seq=seq)
        self._recipe = self._recipe or event.config

    def _same(self, seq: int, event: ev.Event) -> Iterator[Finding]:
        name = subjects.msg_id(event)
        content = digest_of(encode(event)).encode()
        if self._held.setdefault(name, content) != content:
            yield Finding(rule="journal", about=name, text="stands in the journal twice, with different contents", seq=seq)

    def end(self) -> Iterable[Finding]:
        for seq, text in self._malformed.items():
            yield Finding(rule="journal", about=f"event {seq}", text=f"can't be read: {text}", seq=seq)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first key whose value differs; empty: none. A key of one alone is of another release of RL360.

    >>> changed({"run": {"seed": 1}}, {"run": {"seed": 1, "new": 0}}), changed({"run": {"seed": 1}}, {"run": {"seed": 2}})
    ('', 'run.seed')
    """
    for key in before.keys() & after.keys():
        old, new = before[key], after[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if inner := changed(cast(Mapping[str, Any], old), cast(Mapping[str, Any], new)):
                return f"{key}.{inner}"
        elif old != new:
            return key
    return ""
