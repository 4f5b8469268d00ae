"""The way out of a sandbox with an allowlist: an HTTP proxy of the runner's on the sandbox's own loopback, which has nothing else.

A client names a host (CONNECT, or a whole URL); the host must be on the list, its name is resolved here, and the connection goes
to the very address that was looked at. Addresses of this machine and of private networks are refused whatever the list says:
a task comes from a stranger, and behind them lie the journal, the engines and the cloud's metadata.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from rl360.agents.network import allows, public

log = logging.getLogger(__name__)

CONNECTIONS: Final = 32
"""Held at once. Who comes beyond that waits in the kernel's queue, which belongs to the sandbox's own network."""
_HEAD_SECONDS: Final = 30.0
_CONNECT_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 300.0
_END_SECONDS: Final = 10.0
_PAUSE: Final = 0.1
_BREATH: Final = 0.001  # between two connections, so that opening and closing them keeps no core busy
_HEAD_LIMIT: Final = 64 << 10
_CHUNK: Final = 64 << 10
_TOLD: Final = 50  # hosts that are named in the log, of one sandbox

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class Request:
    """What a client asks for. `forwarded` goes to the host first; empty for a tunnel."""

    host: str
    port: int
    forwarded: bytes


class Refused(Exception):
    """An answer of ours instead of the host's."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def parse(head: bytes) -> Request:
    """A request's head, up to and with its empty line. Raises Refused (400). Pure.

    >>> parse(b"CONNECT a.org:443 HTTP/1.1\\r\\n\\r\\n")
    Request(host='a.org', port=443, forwarded=b'')
    >>> parse(b"GET http://a.org/x?y HTTP/1.1\\r\\nHost: b\\r\\nA: 1\\r\\n\\r\\n").forwarded
    b'GET /x?y HTTP/1.1\\r\\nHost: a.org\\r\\nA: 1\\r\\nConnection: close\\r\\n\\r\\n'
    """
    lines = head.decode("latin-1").split("\r\n")
    try:
        method, target, version = lines[0].split(" ")
        tunnel = method == "CONNECT"
        at = urlsplit(f"//{target}" if tunnel else target)
        host, port = at.hostname, at.port or 80
    except ValueError:
        raise Refused(400, "this is no request to an HTTP proxy") from None
    if not host or (tunnel and at.port is None) or (not tunnel and at.scheme != "http"):
        raise Refused(400, "this proxy takes CONNECT HOST:PORT, and http:// URLs")
    if tunnel:
        return Request(host, port, b"")
    path = target[len("http://") + len(at.netloc) :] or "/"
    dropped = ("host:", "connection:", "proxy-connection:", "proxy-authorization:", "keep-alive:")
    kept = [line for line in lines[1:-2] if not line.lower().startswith(dropped)]
    authority = at.netloc.rpartition("@")[2]
    out = [f"{method} {path if path[0] == '/' else f'/{path}'} {version}", f"Host: {authority}", *kept, "Connection: close", "", ""]
    return Request(host, port, "\r\n".join(out).encode("latin-1"))


async def resolve(host: str, port: int) -> list[str]:
    """Its addresses, best first. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]


def reachable(address: str) -> bool:
    """Whether it is of the internet at large, and not this machine's own."""
    return public(address) and not _ours(address)


class Egress:
    """Serves `listener` until it is closed, from a thread of its own. `hosts` are normalised; `name` is the sandbox's, for the log.

    `refused` counts the requests that were refused by host.
    """

    def __init__(
        self,
        listener: socket.socket,
        hosts: Sequence[str],
        name: str,
        *,
        resolve: Resolve = resolve,
        reachable: Callable[[str], bool] = reachable,
    ) -> None:
        self._listener, self._hosts, self._name, self._resolve, self._reachable = listener, hosts, name, resolve, reachable
        self.refused: Counter[str] = Counter()
        self._held: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="egress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it and every connection. A second call does nothing."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it ended in between
                self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_END_SECONDS)
            if self.refused:
                log.warning("sandbox %s: %d requests to hosts that it may not reach were refused", self._name, self.refused.total())

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._listener.close()

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._end.wait()
        held = [accepting, *self._held]
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

    async def _accept(self) -> None:
        seats = asyncio.Semaphore(CONNECTIONS)
        self._listener.setblocking(False)
        while True:
            await seats.acquire()
            try:
                link, _ = await self._loop.sock_accept(self._listener)
            except OSError as e:  # no descriptor is left, or the peer is gone already
                log.warning("sandbox %s: a connection to the proxy could not be taken: %s", self._name, e)
                seats.release()
                await asyncio.sleep(_PAUSE)
                continue
            task = asyncio.create_task(self._hold(link))
            self._held.add(task)
            task.add_done_callback(self._held.discard)
            task.add_done_callback(lambda _: seats.release())
            await asyncio.sleep(_BREATH)

    async def _hold(self, link: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=link, limit=_HEAD_LIMIT)
        try:
            await self._talk(reader, writer)
        except (OSError, EOFError):
            return  # one of the two is gone: the other sees its end
        finally:
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = parse(await _head(reader))
            address = await self._address(request)
            upstream = await self._connect(address, request)
        except Refused as e:
            writer.write(_answer(e))
            await writer.drain()
            return
        try:
            if request.forwarded:
                upstream[1].write(request.forwarded)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pass_on(reader, upstream[1]), _pass_on(upstream[0], writer))
        finally:
            upstream[1].close()

    async def _address(self, request: Request) -> str:
        """The address to connect to. Raises Refused."""
        host = request.host
        if not allows(self._hosts, host):
            raise self._refuse(host, f"{host} is not in the task's allowed_hosts; add it to task.toml if the task needs it")
        try:
            found = await asyncio.wait_for(self._resolve(host, request.port), _CONNECT_SECONDS)
        except (OSError, UnicodeError) as e:
            raise Refused(502, f"{host} has no address here: {e or 'the name server did not answer'}") from None
        for address in found:
            if self._reachable(address):
                return address
        raise self._refuse(host, f"{host} leads to this machine or a private network, which no task reaches")

    def _refuse(self, host: str, why: str) -> Refused:
        name = host[:253]
        if name not in self.refused and len(self.refused) < _TOLD:
            log.warning(
                "sandbox %s: %r: refused: %s", self._name, name, "not reachable for a task" if allows(self._hosts, host) else "not allowed"
            )
        self.refused[name if name in self.refused or len(self.refused) < _TOLD else "others"] += 1
        return Refused(403, why)

    async def _connect(self, address: str, request: Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.wait_for(asyncio.open_connection(address, request.port, limit=_HEAD_LIMIT), _CONNECT_SECONDS)
        except OSError as e:
            raise Refused(502, f"{request.host}:{request.port} can't be reached: {e or 'no answer'}") from None


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
    except asyncio.LimitOverrunError:
        raise Refused(400, f"a request's head has at most {_HEAD_LIMIT} bytes") from None


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the reader's end, which is told. Raises OSError; a silence of `_IDLE_SECONDS` is one."""
    while data := await asyncio.wait_for(reader.read(_CHUNK), _IDLE_SECONDS):
        writer.write(data)
        await asyncio.wait_for(writer.drain(), _IDLE_SECONDS)
    if writer.can_write_eof():
        writer.write_eof()


def _answer(refused: Refused) -> bytes:
    words = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}[refused.status]
    body = f"{refused}\n".encode()
    kind = f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}"
    return f"HTTP/1.1 {refused.status} {words}\r\n{kind}\r\nConnection: close\r\n\r\n".encode() + body


def _ours(address: str) -> bool:
    """Whether this machine has the address: it would be its own peer then. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return False  # no way there at all
        return probe.getsockname()[0] == address
