"""CASES 20 and 22: big sessions never delay small ones, and old tokens cost nothing anew."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rl360.bus.events import TurnCompleted
from rl360.config import Sampling, Sessions
from rl360.sessions import requests
from tests.sessions.conftest import SESSION
from tests.sessions.test_server import USER, answer_of

SMALL = "t3-g004-a2.1"


async def test_case20_a_big_session_does_not_delay_a_small_one(make_rig: Any) -> None:
    rig = await make_rig(sessions=Sessions(max_body_mb=16), sampling=Sampling(max_new_tokens=64, context=2_000_000))
    await rig.open()
    await rig.open(SMALL)
    text = "def f(x): return x + 1\n" * 40_000
    big = asyncio.create_task(rig.chat([{"role": "user", "content": text}]))
    messages: list[Any] = [USER]
    slowest, done = 0.0, 0
    while not big.done():
        started = time.monotonic()
        _, body = await rig.chat(messages, session=SMALL)
        slowest = max(slowest, time.monotonic() - started)
        done += 1
        messages += [answer_of(body), USER]
    code, _ = await big
    assert code == 200
    assert done >= 5, f"{done} small turns beside the big one, the slowest took {slowest:.2f} s"
    turn = next(t for t in await rig.events(TurnCompleted) if t.session == SESSION)
    assert turn.prompt_ids.digest  # too big for the bus: in the blob store
    assert len(rig.ids(turn.prompt_ids)) == turn.prompt_tokens


async def test_old_messages_are_not_parsed_again(rig: Any, monkeypatch: Any) -> None:
    parsed: list[int] = []
    parse = requests.parse_message
    monkeypatch.setattr(requests, "parse_message", lambda raw, i: parsed.append(i) or parse(raw, i))
    messages: list[Any] = [USER]
    for n in range(4):
        _, body = await rig.chat(messages)
        messages += [answer_of(body), {"role": "user", "content": f"go on {n}"}]
    # A message is read when it is new, and once more to be rendered when it is not a reply.
    assert sorted(parsed) == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
