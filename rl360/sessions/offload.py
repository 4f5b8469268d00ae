"""Work on big bodies in a thread, small ones at once: big sessions never delay small ones (CASES 20)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
A = TypeVar("A")

BIG: Final = 256 * 1024
"""Bytes of JSON that take about a millisecond to read."""

BIG_TEXT: Final = 8 * 1024
"""Characters of text that take about a millisecond to tokenize."""

BIG_REPLY: Final = 4096
"""Sampled tokens that take about a millisecond to read as a message."""


async def off_loop(call: Callable[[A], T], argument: A, *, size: int, limit: int) -> T:
    """`call(argument)`, in a thread when `size` is above `limit`."""
    if size <= limit:
        return call(argument)
    return await asyncio.to_thread(call, argument)
