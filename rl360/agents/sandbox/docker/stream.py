"""The daemon's two-way streams: an HTTP/1.1 request that becomes a connection, and the frames that come over it.

The SDK reads such a reply through a buffer and can lose its first bytes, so these few requests are made here.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

_MAX_HEAD: Final = 64 << 10
_FRAME: Final = 8
_CHUNK: Final = 256 << 10
STDOUT: Final = 1
STDERR: Final = 2


def hijack(address: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> tuple[socket.socket, bytes]:
    """POST `path`; the connection after the reply's head, and the stream's bytes that came with it. Raises OSError."""
    link = _connect(address, timeout)
    try:
        content = json.dumps(body or {}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Type: application/json\r\n"
        link.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        reply = b""
        while b"\r\n\r\n" not in reply:
            got = link.recv(4096)
            reply += got
            if not got or len(reply) > _MAX_HEAD:
                raise ConnectionError(f"the Docker daemon ended {path} with {reply[:200]!r}")
        said, _, rest = reply.partition(b"\r\n\r\n")
        status = int(said.split(None, 2)[1])
        if status not in (101, 200):
            rest += link.recv(4096)
            raise ConnectionError(f"the Docker daemon answered {path} with {status}: {rest[:400].decode(errors='replace').strip()}")
    except BaseException:
        link.close()
        raise
    return link, rest


def follow(link: socket.socket, rest: bytes, deadline: float, take: Callable[[bytes], None], enough: Callable[[], bool]) -> bool:
    """Give `rest` and what comes over the connection to `take`, until there is `enough` or `deadline` (monotonic seconds) is over.

    Whether the daemon ended the stream before. Raises OSError, and ValueError for what are no frames.
    """
    frames, data = Frames(), rest
    while True:
        for _, piece in frames.feed(data):
            take(piece)
        if enough() or (left := deadline - time.monotonic()) <= 0:
            return False
        link.settimeout(left)
        try:
            data = link.recv(_CHUNK)
        except TimeoutError:
            return False
        if not data:
            return True


def _connect(address: str, timeout: float) -> socket.socket:
    at = urlsplit(address)
    if at.scheme == "unix":
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(timeout)
        try:
            link.connect(at.path)
        except OSError:
            link.close()
            raise
        return link
    if at.scheme not in ("tcp", "http") or at.hostname is None:
        raise OSError(f"DOCKER_HOST {address!r}: only unix:// and plain tcp:// are supported; forward the daemon's socket (ssh -L)")
    return socket.create_connection((at.hostname, at.port or 2375), timeout)


class Kept:
    """The first `keep` bytes of an output, and the number of all of them. Pure."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self._kept += data[: max(0, self._keep - len(self._kept))]

    @property
    def data(self) -> bytes:
        return bytes(self._kept)


class Frames:
    """Takes the multiplexed stream apart: 1 byte stream, 3 zero bytes, 4 bytes big-endian length, payload. Pure.

    >>> frames = Frames()
    >>> frames.feed(bytes([1, 0, 0, 0, 0, 0, 0, 3]) + b"ab"), frames.feed(b"c" + bytes([2, 0, 0, 0, 0, 0, 0, 1]) + b"d")
    ([(1, b'ab')], [(1, b'c'), (2, b'd')])
    """

    def __init__(self) -> None:
        self._head = b""
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """(stream, bytes) pieces in the order in which they came; a payload may come in several. Raises ValueError."""
        found: list[tuple[int, bytes]] = []
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                found.append((self._stream, piece))
                continue
            need = _FRAME - len(self._head)
            self._head, data = self._head + data[:need], data[need:]
            if len(self._head) == _FRAME:
                if self._head[0] > STDERR or self._head[1:4] != b"\0\0\0":
                    raise ValueError(f"{self._head!r} is no head of a frame of the Docker daemon")
                self._stream, self._left = self._head[0], int.from_bytes(self._head[4:])
                self._head = b""
        return found
