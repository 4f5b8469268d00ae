"""Names and keys of sessions."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

import msgspec

_SESSION: Final = re.compile(r"(?P<attempt>[te](?P<step>\d{1,9})-g(?P<group>\d{1,9})-a\d{1,9})\.\d{1,6}", re.ASCII)


class SessionName(msgspec.Struct, frozen=True):
    """What a session's id says: where its events are in the journal."""

    session: str
    attempt: str
    step: int
    group: int


def parse_session(session: str) -> SessionName | None:
    """Read a session id; None when it is not one.

    >>> parse_session("t12-g003-a5.1").step
    12
    """
    match = _SESSION.fullmatch(session)
    return SessionName(session, match["attempt"], int(match["step"]), int(match["group"])) if match else None


def session_key(admin: str, session: str) -> str:
    """The bearer key of one session, which any session server can check without asking another."""
    return hmac.new(admin.encode(), session.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def rid(session: str, turn: int, asked: bytes, tries: int) -> str:
    """Request id of a model call. Prefix-free, since engines abort by prefix; the same for the same call after a restart.

    >>> rid("t1-g000-a0.1", 2, bytes(16), 0)
    't1-g000-a0.1.0002.00000000.00.'
    """
    return f"{session}.{turn:04d}.{asked[:4].hex()}.{tries:02d}."
