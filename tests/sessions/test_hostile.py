"""An agent that attacks the session server with its own key, or with none: a neighbour's turns are served all the while."""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from rl360.config import Sessions
from rl360.sessions.crowd import MOST
from rl360.sessions.names import session_key
from tests.sessions.conftest import ADMIN, SESSION, Rig
from tests.sessions.test_server import USER, answer_of

NEIGHBOUR = "t3-g004-a2.1"
PATH = f"/sessions/{SESSION}/v1/chat/completions"
BOMB = gzip.compress(bytes(64 << 20))


async def raw(rig: Rig, sent: bytes, hold: asyncio.Event) -> bytes:
    """Send bytes and keep the connection, whatever comes back, until `hold` is set; the first bytes of what came."""
    place = urlsplit(rig.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(sent)
        reading = asyncio.create_task(reader.read(64))
        await asyncio.wait({reading, asyncio.create_task(hold.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await hold.wait()
        return reading.result() if reading.done() else b""
    finally:
        writer.close()


def head(length: int, key: str, path: str = PATH, more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n{more}\r\n".encode()


def flood(key: str) -> list[bytes]:
    return [
        *[head(900_000, key) + b"x" * 500_000] * 100,  # bodies that never end
        *[head(1 << 40, key)] * 20,
        *[head(10, "guess" + key) + b"x" * 10] * 100,
        *[head(len(BOMB), key, more="Content-Encoding: gzip\r\n") + BOMB] * 4,
        *[b"GET /"] * 100,  # heads that never end
        *[b"\x16\x03\x01" + bytes(range(256)) * 40] * 20,
        *[head(2, key, path=f"/sessions/{NEIGHBOUR}/v1/chat/completions") + b"{}"] * 20,
        *[head(2, key, path="/sessions") + b"{}"] * 20,
    ]


async def turns_of_the_neighbour(rig: Rig, number: int) -> None:
    """It gets them, whatever else is held open."""
    messages = [USER]
    for turn in range(number):
        async with asyncio.timeout(60):
            code, body = await rig.chat(messages, session=NEIGHBOUR)
        assert code == 200, body
        messages += [answer_of(body), {"role": "user", "content": f"go on {turn}"}]


@pytest.fixture
async def open_rig(make_rig: Any) -> Rig:
    rig = await make_rig(sessions=Sessions(max_body_mb=1))
    await rig.open()
    await rig.open(NEIGHBOUR)
    return rig


async def test_a_flood_of_one_session_leaves_its_neighbours_served(open_rig: Rig) -> None:
    hold = asyncio.Event()
    attack = [asyncio.create_task(raw(open_rig, sent, hold)) for sent in flood(session_key(ADMIN, SESSION))]
    await turns_of_the_neighbour(open_rig, 20)
    hold.set()
    codes = Counter(said[9:12] for said in await asyncio.gather(*attack))
    assert b"200" not in codes
    assert codes[b"429"] >= 100 + 20 - MOST
    assert codes[b"403"] == 100 + 20 + 20
    assert len(open_rig.engine.requests) == 20


async def test_one_session_has_few_turns_under_way_and_gets_them_one_by_one(open_rig: Rig) -> None:
    """Forty at once with a key of its own: eight wait in line, the others are told to; none of them is a failure of the server."""
    release = asyncio.Event()

    async def slow(body: Any) -> web.Response:
        await release.wait()
        return web.json_response(open_rig.engine.reply(body))

    open_rig.engine.script = [slow]
    first = asyncio.create_task(open_rig.chat([USER]))
    await open_rig.engine.arrived.wait()
    crowd = [asyncio.create_task(open_rig.chat([{"role": "user", "content": f"{n}"}])) for n in range(40)]
    refused = 0
    for done in asyncio.as_completed(crowd):
        refused += (await done)[0] == 429
        if refused == 40 - (MOST - 1):
            break
    release.set()
    codes = Counter(code for code, _ in await asyncio.gather(first, *crowd))
    assert codes == {200: MOST, 429: 40 - (MOST - 1)}
    await turns_of_the_neighbour(open_rig, 1)
