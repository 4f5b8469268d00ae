"""Which engines a recipe's faults strike, and when: as soon as the first outcome of the fault's training step is in the journal. Pure.

engine_kill   SIGKILL to the engine's whole process group
engine_hang   SIGSTOP to it: the server accepts connections and answers nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rl360.agents.faults import strikes
from rl360.bus import events as ev
from rl360.config import Fault
from rl360.trainer.metrics import belongs

FOLDED: Final[tuple[type[ev.Event], ...]] = (ev.VerifierResult, ev.InfraFailed, ev.FaultInjected)


class EngineFaults:
    """Fold of `FOLDED`. `engines` are the names of the run's engine workers."""

    def __init__(self, run: str, plan: Sequence[Fault], *, seed: int, engines: Sequence[str]) -> None:
        self._run = run
        self._planned = {
            (number, engine): fault
            for number, fault in enumerate(plan)
            if fault.of_engines
            for engine in engines
            if strikes(number, fault, seed=seed, name=engine)
        }
        self._reached: set[int] = set()

    def on(self, event: ev.Event) -> None:
        if isinstance(event, ev.FaultInjected):
            self._planned.pop((event.fault, event.target), None)
        elif belongs(event) is ev.Purpose.TRAIN:
            self._reached.add(event.step)

    @property
    def pending(self) -> bool:
        """A fault has yet to strike."""
        return bool(self._planned)

    def due(self) -> list[ev.FaultInjected]:
        """The faults to strike now. Each is due until the journal holds it, so it strikes once in a run's whole life."""
        return [
            ev.FaultInjected(run=self._run, step=fault.step, fault=number, kind=fault.kind, target=engine)
            for (number, engine), fault in self._planned.items()
            if fault.step in self._reached
        ]
