"""S6 to S9: every session merged again by the merger's own fold; what it says must be what was recorded, to the byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rl360.audit.finding import Finding
from rl360.bus import events as ev
from rl360.bus.blobs import BlobError, BlobStore, digest_of
from rl360.bus.codec import Recorded
from rl360.bus.payload import Payload
from rl360.bus.sample import SampleError
from rl360.config import ConfigError, parse
from rl360.sessions.merge import MergeError
from rl360.sessions.merger import Merger
from rl360.sessions.routing import RoutingError


class MergeCheck:
    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._merger = self._start(replay=False)
        self._again: dict[tuple[str, int], ev.TrajectoryMerged] = {}

    def _start(self, *, replay: bool) -> Merger:
        return Merger(pack=_named, unpack=self._blobs.unpack, replay=replay)

    def on(self, recorded: Recorded) -> Iterator[Finding]:
        event = recorded.event
        if isinstance(event, ev.RunStarted):
            self._started(event)
        elif isinstance(event, ev.TrajectoryMerged):
            yield from self._compare(recorded.seq, event)
        else:
            yield from self._fold(recorded)

    def end(self) -> Iterable[Finding]:
        return ()

    def _compare(self, seq: int, event: ev.TrajectoryMerged) -> Iterator[Finding]:
        again = self._again.pop((event.session, event.branch), None)
        if again is not None and (text := _difference(event, again)):
            about = f"{event.session} branch {event.branch}"
            yield Finding(rule="S6", about=about, text=f"merged again, it differs: {text}", seq=seq)

    def _started(self, event: ev.RunStarted) -> None:
        if event.resumed:
            return
        try:
            self._merger = self._start(replay=parse(event.config).engine.routed_experts)
        except ConfigError:
            return  # the decision check says so

    def _fold(self, recorded: Recorded) -> Iterator[Finding]:
        try:
            for event in self._merger.on(recorded):
                if isinstance(event, ev.TrajectoryMerged):
                    self._again[event.session, event.branch] = event
        except (MergeError, RoutingError, SampleError) as e:
            about = str(getattr(recorded.event, "session", recorded.event.run))
            yield Finding(rule="S6", about=about, text=f"its turns don't fit together: {e}", seq=recorded.seq)
        except BlobError:
            return  # the blob check says so, or retention removed it


def _named(data: bytearray) -> Payload:
    """The name of bytes, without storing them."""
    return Payload(size=len(data), digest=digest_of(data))


def _difference(recorded: ev.TrajectoryMerged, again: ev.TrajectoryMerged) -> str:
    pairs = ((n, _content(getattr(recorded, n)), _content(getattr(again, n))) for n in recorded.__struct_fields__)
    return ", ".join(f"{name} {old!r}, not {new!r}" for name, old, new in pairs if old != new)


def _content(value: object) -> object:
    if not isinstance(value, Payload):
        return value
    return value.size, value.digest or digest_of(value.inline or b"")
