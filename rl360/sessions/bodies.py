"""What comes with a request besides its fields: the bytes of its body, and its id."""

from __future__ import annotations

import asyncio
import re
import zlib
from typing import Final

from aiohttp import web

from rl360.sessions.requests import RequestError

_LONGEST: Final = 200
_REQUEST_ID: Final = re.compile(f"[ -~]{{0,{_LONGEST}}}")
_WBITS: Final = {"gzip": 31, "deflate": 15}


def request_id(request: web.Request) -> str:
    """The id that makes a retry a retry (S5), or "". A shortened one could be another request's: it is refused. Raises RequestError."""
    given = request.headers.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(given):
        raise RequestError(400, "invalid_request_id", f"x-request-id: use at most {_LONGEST} printable ASCII characters", "x-request-id")
    return given


async def read(request: web.Request) -> bytes:
    """The body, unpacked. Raises RequestError, and HTTPRequestEntityTooLarge."""
    coding = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
    if coding not in ("", "identity", *_WBITS):
        detail = f"Content-Encoding {coding!r} can't be read: send the body plain, or as {' or '.join(_WBITS)}"
        raise RequestError(415, "unsupported_encoding", detail, "content-encoding")
    try:
        data = await request.read()
    except (web.RequestPayloadError, ConnectionResetError) as e:  # it hung up: nobody reads the answer
        raise RequestError(400, "invalid_body", f"the body can't be read to its end: {e}") from None
    if coding in ("", "identity"):
        return data
    return await asyncio.to_thread(unpacked, data, coding, request.client_max_size)


def unpacked(data: bytes, coding: str, limit: int) -> bytes:
    """`data` decompressed, at most `limit` bytes of it. Raises RequestError."""
    unzip = zlib.decompressobj(_WBITS[coding])
    try:
        body = unzip.decompress(data, limit + 1)
    except zlib.error as e:
        raise _bad(coding, str(e)) from None
    if len(body) > limit:
        raise RequestError(413, "body_too_large", f"the body has more than {limit} bytes once it is unpacked")
    if not unzip.eof:
        raise _bad(coding, "it ends before its end")
    if unzip.unused_data:
        raise _bad(coding, "something follows its end")
    return body


def _bad(coding: str, why: str) -> RequestError:
    return RequestError(400, "invalid_encoding", f"Content-Encoding says {coding}, the body is none: {why}", "content-encoding")
