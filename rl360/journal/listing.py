"""A journal at a glance: what each step has. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from rl360.bus import events as ev
from rl360.bus import selection, subjects
from rl360.bus.codec import EventError, Message, record
from rl360.bus.payload import digests
from rl360.journal.pruned import Pruned


@dataclass
class StepListing:
    """Of one step, or of no step. `bytes` are of event bodies; times are unix seconds."""

    first: Message
    last: Message
    bytes: int = 0
    types: Counter[str] = field(default_factory=Counter[str])
    blobs: set[str] = field(default_factory=set[str])


class Listing:
    """Fold of a journal's messages."""

    def __init__(self) -> None:
        self.steps: dict[int, StepListing] = {}
        self.pruned = Pruned()
        self.malformed = 0

    def on(self, message: Message) -> None:
        name = subjects.parse(message.subject)
        step = self.steps.setdefault(name.step, StepListing(message, message))
        step.last = message
        step.bytes += len(message.body)
        step.types[name.type] += 1
        step.blobs.update(digests(message.body))
        if name.type == ev.BlobsPruned.__name__:
            try:
                self.pruned.on(record(message))
            except EventError:
                self.malformed += 1

    @property
    def unknown(self) -> Counter[str]:
        """Events of types that this version doesn't know."""
        total = sum((s.types for s in self.steps.values()), start=Counter[str]())
        return Counter({t: n for t, n in total.items() if t not in ev.EVENT_TYPES})

    def lines(self, run: str, pinned: Collection[int], size: Callable[[str], int | None]) -> Iterator[str]:
        """A table. `size` of a blob is None where it is gone."""
        count, total = sum(s.types.total() for s in self.steps.values()), sum(s.bytes for s in self.steps.values())
        yield f"run {run}: {count} events, {amount(total)}"
        yield f"{'step':>5} {'events':>8} {'first':>9} {'last':>9}  {'began':<19} {'seconds':>8} {'bytes':>9} {'blobs':>9}  state"
        for number, step in sorted(self.steps.items()):
            yield self._line(number, step, pinned, size)
            yield "      " + ", ".join(f"{t} {n}" for t, n in sorted(step.types.items()))
        if self.unknown:
            told = ", ".join(f"{t} {n}" for t, n in sorted(self.unknown.items()))
            yield f"not known to this version of RL360, and skipped by what reads them: {told}"
        if self.malformed:
            yield f"{self.malformed} events can't be read: `rl360 audit` names them"

    def _line(self, number: int, step: StepListing, pinned: Collection[int], size: Callable[[str], int | None]) -> str:
        began = datetime.fromtimestamp(step.first.time).isoformat(sep=" ", timespec="seconds")
        blobs = sum(size(d) or 0 for d in step.blobs)
        state = "pinned" if number in pinned else "pruned" if self.pruned.covers(number) else ""
        name = "-" if number == selection.NO_STEP else str(number)
        return (
            f"{name:>5} {step.types.total():>8} {step.first.seq:>9} {step.last.seq:>9}  {began} {step.last.time - step.first.time:>8.1f} "
            f"{amount(step.bytes):>9} {amount(blobs):>9}  {state}"
        ).rstrip()


def amount(size: int) -> str:
    """Bytes for people.

    >>> amount(65_393_278)
    '65.4 MB'
    """
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
