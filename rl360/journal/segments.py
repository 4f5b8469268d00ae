"""Messages grouped by step on their way into an archive, and put back into one order on their way out. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from rl360.bus import selection, subjects
from rl360.bus.codec import Message
from rl360.journal.manifest import Segment

SEGMENT_BYTES: Final = 16 << 20
"""Bodies in one member: what a reader holds at once for each step under way."""
HELD_BYTES: Final = 64 << 20
"""Bodies that a writer holds at once, over all steps."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


class SegmentWriter:
    """Takes messages in order; `write(name, data)` gets each full segment."""

    def __init__(self, write: Callable[[str, bytes], None], *, segment_bytes: int = SEGMENT_BYTES, held_bytes: int = HELD_BYTES) -> None:
        self._write, self._segment_bytes, self._held_bytes = write, segment_bytes, held_bytes
        self._open: dict[int, list[Message]] = {}
        self._bytes: dict[int, int] = {}
        self._written: dict[int, int] = {}  # step -> segments so far
        self.segments: list[Segment] = []

    def add(self, message: Message) -> None:
        step = subjects.parse(message.subject).step
        self._open.setdefault(step, []).append(message)
        self._bytes[step] = self._bytes.get(step, 0) + len(message.body)
        if self._bytes[step] >= self._segment_bytes:
            self._close(step)
        elif sum(self._bytes.values()) >= self._held_bytes:
            self.finish()

    def finish(self) -> None:
        for step in sorted(self._open):
            self._close(step)

    def _close(self, step: int) -> None:
        messages = self._open.pop(step)
        del self._bytes[step]
        number = self._written[step] = self._written.get(step, -1) + 1
        of = "run" if step == selection.NO_STEP else f"step-{step:06d}"
        name = f"journal/events/{of}-{number:04d}.msgpack"
        self._write(name, _encoder.encode(messages))
        self.segments.append(Segment(name, step, len(messages), messages[0].seq, messages[-1].seq))


def decode(data: bytes, segment: Segment) -> list[Message]:
    """Messages of a segment. Raises ValueError when it does not hold what its manifest says."""
    messages = _decoder.decode(data)
    seqs = [m.seq for m in messages]
    told = (segment.messages, segment.first, segment.last)
    if not seqs or (len(seqs), seqs[0], seqs[-1]) != told or any(a >= b for a, b in itertools.pairwise(seqs)):
        raise ValueError(f"{segment.name} does not hold the {segment.messages} messages {segment.first} to {segment.last} in order")
    if any(subjects.parse(m.subject).step != segment.step for m in messages):
        raise ValueError(f"{segment.name} holds messages of another step")
    return messages


def in_order(segments: Iterable[Segment], read: Callable[[Segment], Sequence[Message]]) -> Iterator[Message]:
    """All messages by sequence. A segment is read when its first message is due, so few are held at once."""
    waiting = sorted(segments, key=lambda s: s.first, reverse=True)
    heads: list[tuple[int, Message, Iterator[Message]]] = []
    while waiting or heads:
        while waiting and (not heads or waiting[-1].first < heads[0][0]):
            _push(heads, iter(read(waiting.pop())))
        _, message, rest = heapq.heappop(heads)
        yield message
        _push(heads, rest)


def _push(heads: list[tuple[int, Message, Iterator[Message]]], rest: Iterator[Message]) -> None:
    if (message := next(rest, None)) is not None:
        heapq.heappush(heads, (message.seq, message, rest))
