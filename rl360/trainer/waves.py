"""How many attempts start now (CASES 41): waves bounded by time and by how many are still starting. Pure."""

from __future__ import annotations

from rl360.config import Waves


def wave_size(waves: Waves, *, pending: int, starting: int, last: float | None, now: float) -> int:
    """Attempts to admit at `now` (unix seconds); 0 while a wave isn't due.

    `pending` wait for admission, `starting` were admitted and have no sandbox yet, `last` is when the last wave went.
    """
    if last is not None and now - last < waves.interval:
        return 0
    return max(0, min(pending, waves.size, waves.max_starting - starting))
