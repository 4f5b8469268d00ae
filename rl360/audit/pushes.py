"""S24: every push was completed, or the engine that missed it was fenced or lost; traffic only after a push (CASES 27, 31)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rl360.audit.finding import Finding
from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.engines.membership import Membership


class PushCheck:
    """Decides with membership's own fold who is to be fenced, and looks for those events. `whole`: all pushes are in the journal."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._members = Membership("", grace=0.0)
        self._missed: dict[str, tuple[int, int, str]] = {}  # generation -> event, version, cause
        self._ready: set[tuple[str, int, str]] = set()  # generation, version, checksum that a push completed
        self._newest = -1

    def on(self, recorded: Recorded) -> Iterator[Finding]:
        event = recorded.event
        decided = self._members.on(recorded)
        match event:
            case ev.WeightsPushed():
                self._pushed(recorded.seq, event, [e for e in decided if isinstance(e, ev.EngineFenced)])
            case ev.EngineReady():
                if self._whole and (event.generation, event.version, event.checksum) not in self._ready:
                    text = f"got traffic at version {event.version}, which no push completed on it with that checksum"
                    yield Finding(rule="S24", about=event.generation, text=text, seq=recorded.seq)
            case ev.EngineFenced() | ev.EngineLost():
                self._missed.pop(event.generation, None)
            case _:
                pass

    def end(self) -> Iterable[Finding]:
        """Membership answers within moments: once the next version is pushed, who missed the one before must be out."""
        for generation, (seq, version, cause) in self._missed.items():
            if self._newest > version:
                text = f"{cause}, and it was neither fenced nor lost"
                yield Finding(rule="S24", about=generation, text=text, seq=seq)

    def _pushed(self, seq: int, push: ev.WeightsPushed, fenced: list[ev.EngineFenced]) -> None:
        self._newest = max(self._newest, push.version)
        for event in fenced:
            self._missed.setdefault(event.generation, (seq, push.version, event.cause))
        self._ready |= {(r.generation, push.version, r.checksum) for r in push.results if r.ok and r.checksum == push.checksum}
