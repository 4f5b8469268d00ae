"""What `rl360 chaos` does to a run and when: a seeded sequence, so that a finding can be looked for again.

A moment is the n-th event of some type from the last blow on, and a little later. Types that are rare in a step (its training,
its push) are drawn as often as those that are common, or nearly every blow would fall among turns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import msgspec

from rl360.bus import events as ev
from rl360.config import Config, ConfigError
from rl360.launch.kinds import workers_of

WHOLE: Final = "whole run"
"""Every process at once, the supervisor and nats-server with them; then `--resume`."""
CRASH: Final = "machine"
"""The same, and the journal loses what was recorded since a moment before; then `--resume`."""

ANCHORS: Final[dict[type[ev.Event], int]] = {
    ev.RunStarted: 1,
    ev.StepOpened: 1,
    ev.RolloutRequested: 32,
    ev.RolloutAdmitted: 32,
    ev.SessionOpened: 32,
    ev.RolloutPhase: 120,
    ev.TurnCompleted: 80,
    ev.SessionClosed: 32,
    ev.VerifierResult: 32,
    ev.TrajectoryMerged: 32,
    ev.GroupDecided: 8,
    ev.StepTrained: 1,
    ev.StepClosed: 1,
    ev.PlanBuilt: 1,
    ev.WeightsPushed: 1,
    ev.EngineJoined: 1,
    ev.EngineReady: 1,
}
"""Event types, and up to which occurrence of each a blow may wait: about as many as there are in a step."""
_DELAY: Final = 0.4  # most seconds from the event to the blow
_WHOLE_SHARE: Final = 0.12  # of all blows: they cost a start
_CRASH_SHARE: Final = 0.25  # of those, how many take the journal's end as well


class Blow(msgspec.Struct, frozen=True, kw_only=True):
    """Kill `target` (a child's name, `WHOLE` or `CRASH`) `delay` seconds after the `nth` event of type `anchor`."""

    target: str
    anchor: str
    nth: int
    delay: float

    def __str__(self) -> str:
        return f"{self.anchor} {self.nth} + {self.delay:.2f} s"


def targets(config: Config, only: str = "") -> list[str]:
    """Names of a run's children that begin with `only`. Raises ConfigError where there are none."""
    every = [*(f"{kind}{index}" for kind, index in workers_of(config)), "gateway", "nats-server"]
    chosen = [name for name in every if name.startswith(only)]
    if not chosen:
        raise ConfigError(f"--only {only}: nothing of this recipe is called so; it has {', '.join(every)}")
    return chosen


def blows(seed: int, config: Config, only: str = "") -> Iterator[Blow]:
    """An endless sequence. Every target comes up equally often: they are dealt like cards, in a new order each round.

    `only`: targets whose name begins so, and never the whole run.
    """
    draw = random.Random(f"chaos/{seed}")
    anchors = list(ANCHORS)
    names = targets(config, only)
    deck: list[str] = []
    while True:
        if not deck:
            deck = draw.sample(names, len(names))
        whole = not only and draw.random() < _WHOLE_SHARE
        target = (CRASH if draw.random() < _CRASH_SHARE else WHOLE) if whole else deck.pop()
        anchor = draw.choice(anchors)
        yield Blow(target=target, anchor=anchor.__name__, nth=draw.randint(1, ANCHORS[anchor]), delay=draw.uniform(0, _DELAY))
