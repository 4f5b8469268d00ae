"""Why a text is no JSON, in words that name the fault. Pure.

msgspec calls a lone surrogate near the end of a text truncated, and names no place for bytes that are no UTF-8.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

_ESCAPE: Final = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_VAGUE: Final = ("truncated", "surrogate", "hex escape", "Invalid UTF-8")


def reason(data: bytes, error: Exception) -> str:
    """What `error`, raised by decoding `data`, is about."""
    if isinstance(error, RecursionError):
        return "nested too deep to be read"
    said = str(error)
    if isinstance(error, msgspec.ValidationError) or not any(v in said for v in (*_VAGUE, "codec")):
        return said
    return _utf8(data) or _surrogate(data) or said


def _utf8(data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as e:
        return f"invalid UTF-8 at byte {e.start} (0x{data[e.start]:02x}): a JSON text is UTF-8"
    return ""


def _surrogate(data: bytes) -> str:
    """The first half of a pair of \\u escapes that stands alone."""
    high: re.Match[bytes] | None = None
    for found in _ESCAPE.finditer(data):
        unit = int(found[1], 16) if found[1] else 0
        if high is not None and not (0xDC00 <= unit < 0xE000 and found.start() == high.end()):
            return _lone(high)
        if high is None and 0xDC00 <= unit < 0xE000:
            return _lone(found)
        high = found if 0xD800 <= unit < 0xDC00 else None
    return _lone(high) if high is not None else ""


def _lone(found: re.Match[bytes]) -> str:
    return f"lone surrogate {found[0].decode()} at byte {found.start()}: half a character; send both halves, or U+FFFD in its place"
