"""Orders from the trainer's event loop to the part of each rank that sends experts, beside the commands that train.

A rank in a process of its own has a socket for it: frames of 4 bytes of size and msgpack, answers by number. An order blocks at most for
its own timeout, in a thread of its own; a rank whose socket ends is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import BinaryIO, Final, cast

import msgspec

from rl360.engines.expert_rank import ExpertRank, Order
from rl360.engines.together import detached

_SIZE: Final = 4  # bytes, little-endian
_GRACE: Final = 5.0  # seconds beyond an order's own timeout


class _Ask(msgspec.Struct, frozen=True):
    number: int
    order: Order


class _Told(msgspec.Struct, frozen=True):
    """`error`: empty when the order was carried out."""

    number: int
    error: str


class ExpertLines:
    """All ranks, as rank 0 orders them: `own` is rank 0's, `sockets` lead to the others."""

    def __init__(self, own: ExpertRank, sockets: Mapping[int, socket.socket]) -> None:
        self._own, self._sockets = own, sockets
        self._lines: dict[int, _Line] = {}

    async def open(self) -> None:
        """Before the first order."""
        for rank, sock in self._sockets.items():
            self._lines[rank] = _Line(rank, *await asyncio.open_connection(sock=sock))

    def close(self) -> None:
        for line in self._lines.values():
            line.close()

    async def do(self, orders: Mapping[int, Order]) -> None:
        """Carry these out, all at once. Raises RuntimeError, which names a rank that could not."""
        await asyncio.gather(*(self._do(rank, order) for rank, order in orders.items()))

    async def _do(self, rank: int, order: Order) -> None:
        if rank:
            return await self._lines[rank].ask(order)
        await detached(lambda: self._own.perform(order))


class _Line:
    """To one rank."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._rank, self._reader, self._writer = rank, reader, writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._task = asyncio.create_task(self._read(), name=f"experts of rank {rank}")

    async def ask(self, order: Order) -> None:
        if self._task.done():
            raise RuntimeError(f"rank {self._rank} is gone")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(_frame(_Ask(number, order)))
        try:
            async with asyncio.timeout(order.timeout + _GRACE):
                error = await answer
        except TimeoutError:
            error = f"no answer within {order.timeout + _GRACE:g} s"
        finally:
            self._waiting.pop(number, None)
        if error:
            raise RuntimeError(f"rank {self._rank}: {error}")

    def close(self) -> None:
        self._task.cancel()
        self._writer.close()

    async def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(_SIZE), "little")
                told = msgspec.msgpack.decode(await self._reader.readexactly(size), type=_Told)
                if (answer := self._waiting.get(told.number)) is not None and not answer.done():
                    answer.set_result(told.error)
        except (asyncio.IncompleteReadError, ConnectionError):
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_result("is gone")


def serve(sock: socket.socket, rank: ExpertRank) -> None:
    """Carry out orders in this rank's process until the socket ends; returns at once."""
    threading.Thread(target=_serve, args=(sock, rank), name="experts", daemon=True).start()


def _serve(sock: socket.socket, rank: ExpertRank) -> None:
    stream, lock = cast(BinaryIO, sock.makefile("rwb", buffering=0)), threading.Lock()
    with sock, suppress(ConnectionError):
        while len(head := _exactly(stream, _SIZE)) == _SIZE:
            ask = msgspec.msgpack.decode(_exactly(stream, int.from_bytes(head, "little")), type=_Ask)
            threading.Thread(target=_carry_out, args=(ask, rank, sock, lock), name="experts", daemon=True).start()


def _carry_out(ask: _Ask, rank: ExpertRank, sock: socket.socket, lock: threading.Lock) -> None:
    error = ""
    try:
        rank.perform(ask.order)
    except RuntimeError as e:
        error = (str(e).splitlines() or [type(e).__name__])[0]
    with lock, suppress(OSError):  # rank 0 is gone: so is this process, soon
        sock.sendall(_frame(_Told(ask.number, error)))


def _exactly(stream: BinaryIO, size: int) -> bytes:
    """Less at the end of the stream."""
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _frame(value: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(_SIZE, "little") + data
