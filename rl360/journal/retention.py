"""What retention may remove: what only old steps need, and no pinned one. Pure.

A step needs its blobs, and the weights that its tokens and its gradient can come from: the version that it trains on, and
those before it that its tokens may have (`trainer.max_staleness`). Steps that are kept need them too, so whatever a resumed
trainer recalls stays. Events always stay: the stream refuses to delete.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.codec import Message, record
from rl360.bus.payload import digests
from rl360.config import Config, parse
from rl360.journal.pruned import Pruned


class Needs:
    """Fold of a journal's messages: who needs what."""

    def __init__(self) -> None:
        self.pruned = Pruned()
        self.opened: set[int] = set()
        self._digests: dict[int, set[str]] = {}  # step -> blobs
        self._trained: dict[int, int] = {}  # step -> version after it
        self._start = 0
        self._config = Config()

    def on(self, message: Message) -> None:
        """Raises EventError or ConfigError for a message that decides what is needed and can't be read."""
        name = subjects.parse(message.subject)
        self._digests.setdefault(name.step, set()).update(digests(message.body))
        if name.type not in ("RunStarted", "StepOpened", "StepTrained", "BlobsPruned"):
            return
        read = record(message)
        self.pruned.on(read)
        match read.event:
            case ev.RunStarted() as event:
                self._config = parse(event.config)
            case ev.StepOpened(purpose=ev.Purpose.TRAIN) as event:
                self.opened.add(event.step)
                if event.step == 0:
                    self._start = event.version
            case ev.StepTrained() as event:
                self._trained.setdefault(event.step, event.version)
            case _:
                pass

    @property
    def newest(self) -> int:
        """The last step that is trained; -1: none."""
        return max(self._trained, default=-1)

    def only(self, steps: Collection[int]) -> set[str]:
        """Blobs that these steps' events name and no others."""
        named = {d for step in steps for d in self._digests.get(step, ())}
        return named - {d for step, digests in self._digests.items() if step not in steps for d in digests}

    def versions(self, steps: Collection[int]) -> set[int]:
        """Versions whose weights these steps need."""
        bound = self._config.trainer.max_staleness
        return {v for step in steps for v in range(self.trained_on(step) - bound, self.trained_on(step) + 1)}

    def resume(self) -> set[int]:
        """Versions that a resumed trainer takes up or recalls."""
        version = self._trained.get(self.newest, self._start)
        return set(range(version - self._config.trainer.max_staleness, version + 1))

    def trained_on(self, step: int) -> int:
        """Version that a step trains on; of the newest there is, while the step before is not trained."""
        return self._trained.get(step - 1, self._start if step <= 0 else self._trained.get(self.newest, self._start))


@dataclass(frozen=True)
class Plan:
    """What is to go: steps `first` to `last` except `kept`."""

    first: int
    last: int
    kept: tuple[int, ...]
    blobs: tuple[str, ...]
    checkpoints: tuple[str, ...]


def plan(needs: Needs, checkpoints: Mapping[str, int], *, keep_steps: int, pinned: Collection[int]) -> Plan | None:
    """What the newest `keep_steps` trained steps, steps under way and pinned steps don't need. None: all steps are kept.

    `checkpoints`: name -> version.
    """
    last = needs.newest - keep_steps
    old = {step for step in needs.opened if step <= last}
    kept = {step for step in needs.opened if step > last or step in pinned}
    gone = old - kept
    if not gone:
        return None
    versions = needs.versions(kept) | needs.resume()
    return Plan(
        first=min(old),
        last=last,
        kept=tuple(sorted(old & kept)),
        blobs=tuple(sorted(needs.only(gone))),
        checkpoints=tuple(sorted(name for name, version in checkpoints.items() if version not in versions)),
    )
