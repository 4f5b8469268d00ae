"""A listening socket that a hostile agent can reach: it opens as many connections as it likes, we hold a few and no more."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from aiohttp import web

log = logging.getLogger(__name__)

CONNECTIONS: Final = 32
"""Held at once. Who comes beyond that waits in the kernel's queue, which belongs to the sandbox's own network."""
_PAUSE: Final = 0.1
_BREATH: Final = 0.001  # seconds between two connections, so that opening and closing them keeps no core busy


class _Counted(web.RequestHandler):
    """One connection, which gives its seat back when it ends."""

    __slots__ = ("_seats",)

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, seats: asyncio.Semaphore) -> None:
        super().__init__(server, loop=loop, access_log=None)  # pyright: ignore[reportArgumentType]  (None: no access log)
        self._seats = seats

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._seats.release()


async def serve(server: web.Server, listener: socket.socket) -> None:
    """Accept connections of `listener`, until cancelled."""
    loop, seats = asyncio.get_running_loop(), asyncio.Semaphore(CONNECTIONS)
    listener.setblocking(False)
    while True:
        await seats.acquire()
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as e:  # no descriptor is left, or the peer is gone already
            log.warning("an agent's connection could not be taken: %s", e)
            seats.release()
            await asyncio.sleep(_PAUSE)
            continue
        await loop.connect_accepted_socket(lambda: _Counted(server, loop, seats), connection)
        await asyncio.sleep(_BREATH)
