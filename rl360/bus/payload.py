"""Bytes inside events: inline when small, else a claim check on the blob store (content-addressed)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, cast

import msgspec

INLINE_LIMIT = 64 * 1024
"""Bytes above this travel by the blob store (DESIGN: nothing above 256 KiB on the bus, several payloads an event)."""


class Payload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of `inline` and `digest` is set; `size` is always the length of the bytes."""

    size: int
    inline: bytes | None = None
    digest: str = ""


_CLAIM: Final = {"size", "digest"}


def digests(body: bytes) -> Iterator[str]:
    """Digests of the blobs that an encoded event names, of a type that this version doesn't know as well."""
    if b"digest" in body:
        yield from _claims(msgspec.msgpack.decode(body))


def _claims(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        found = cast(dict[str, Any], value)
        if found.keys() == _CLAIM:
            yield str(found["digest"])
        for part in found.values():
            yield from _claims(part)
    elif isinstance(value, list):
        for part in cast(list[Any], value):
            yield from _claims(part)
