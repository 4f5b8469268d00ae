"""How many requests of one session may be under way: a session takes one turn at a time, so many are a loop or an attack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from rl360.sessions.requests import RequestError

MOST: Final = 8
"""A client that timed out and tries again has a few. Each may hold `sessions.max_body_mb`, so their number bounds memory."""


class Crowd:
    """Requests under way, by session."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def place(self, session: str) -> Generator[None]:
        """One request of a session, from before its body is read. Raises RequestError (429) for one too many."""
        if self._under_way[session] >= MOST:
            raise RequestError(429, "too_many_requests", f"{MOST} requests of this session are under way: wait for their answers")
        self._under_way[session] += 1
        try:
            yield
        finally:
            self._under_way[session] -= 1
            if not self._under_way[session]:
                del self._under_way[session]
