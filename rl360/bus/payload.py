"""Bytes inside events: inline when small, else a claim check on the blob store (content-addressed)."""

from __future__ import annotations

import msgspec

INLINE_LIMIT = 64 * 1024
"""Bytes above this travel by the blob store (DESIGN: nothing above 256 KiB on the bus, several payloads an event)."""


class Payload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of `inline` and `digest` is set; `size` is always the length of the bytes."""

    size: int
    inline: bytes | None = None
    digest: str = ""
