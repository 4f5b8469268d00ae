"""Waiting for a file descriptor."""

from __future__ import annotations

import select


def readable(fd: int, seconds: float) -> bool:
    """Whether there is something to read, or an end, within `seconds`. A runner has more descriptors than select() can number."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))
