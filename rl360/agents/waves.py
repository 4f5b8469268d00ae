"""Which of the waiting sandboxes start now (CASES 41): bounded by time, by starts and pulls under way, and by what is reserved. Pure.

Two doors, one behind the other. The scheduler admits attempts in waves over all nodes (`wave_size`); then each node lets in
what it has room for, and pulls few images at once (`pick`). A start that failed comes back through the second door, so a
retry pulls no more than a first try may.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rl360.agents.placement import Need, Node
from rl360.config import Waves

_LONGEST: Final = 32
"""A retry waits at most so many times the first one's wait."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A sandbox that waits to be started from `image` ("": from none, nothing to pull), not before `due` (seconds)."""

    id: str
    need: Need
    image: str = ""
    due: float = 0.0


def wave_size(waves: Waves, *, pending: int, starting: int, last: float | None, now: float) -> int:
    """Attempts to admit at `now` (unix seconds); 0 while a wave isn't due.

    `pending` wait for admission, `starting` were admitted and have no sandbox yet, `last` is when the last wave went.
    """
    if last is not None and now - last < waves.interval:
        return 0
    return max(0, min(pending, waves.size, waves.max_starting - starting))


def pull_share(waves: Waves, nodes: int) -> int:
    """Images that one of `nodes` may pull at once, so that together they keep to `waves.max_pulls`; 0: no bound.

    Raises ValueError for a bound below the number of nodes, which a recipe can't have.

    >>> pull_share(Waves(max_pulls=9), 4)
    2
    """
    if 0 < waves.max_pulls < nodes:
        raise ValueError(f"{waves.max_pulls} pulls can't be shared by {nodes} nodes")
    return waves.max_pulls // nodes


def pick(node: Node, waiting: Iterable[Start], *, max_pulls: int, now: float) -> tuple[list[Start], Node]:
    """Those of `waiting` (oldest first) that start at `now`, and the node after that. `max_pulls` 0: no bound.

    Nobody is overtaken for ever: behind a start that the node has no room for, nobody is let in. One that must wait for a
    pull (the registry's budget is used up, or its own image is on the way) lets others pass, and is the first to pull next.
    """
    going: list[Start] = []
    for start in waiting:
        if start.due > now or _must_wait_for_a_pull(node, start.image, max_pulls):
            continue
        if not node.fits(start.need):
            break
        node = node.begin(start.image, start.need)
        going.append(start)
    return going, node


def retry_at(waves: Waves, *, tries: int, now: float, random: float) -> float | None:
    """When a start that failed `tries` times is tried again; None: no more. `random` in [0, 1) spreads those that failed together.

    >>> retry_at(Waves(retry_seconds=2.0), tries=2, now=100.0, random=0.5)
    103.0
    """
    if tries >= waves.tries:
        return None
    wait = waves.retry_seconds * min(2 ** (tries - 1), _LONGEST)
    return now + wait * (0.5 + random / 2)


def _must_wait_for_a_pull(node: Node, image: str, max_pulls: int) -> bool:
    return node.is_cold(image) and (image in node.pulling or 0 < max_pulls <= len(node.pulling))
