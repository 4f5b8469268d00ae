"""CASES 18 and 19: a session outlives its server, by the journal alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl360.bus.connection import BusError
from rl360.bus.events import (
    AgentEnd,
    Receipt,
    SessionClosed,
    SessionOpened,
    TrajectoryMerged,
    TurnCompleted,
    VerifierResult,
)
from rl360.bus.sample import decode
from rl360.bus.worker import react
from rl360.config import Sampling
from rl360.sessions.client import SessionError
from rl360.sessions.merge_worker import merged_sessions
from rl360.sessions.merger import TYPES, Merger
from tests.sessions.conftest import SESSION, Rig
from tests.sessions.fake_engine import call, hang

USER: dict[str, Any] = {"role": "user", "content": "list files"}


def answer_of(body: Any) -> dict[str, Any]:
    return body["choices"][0]["message"]


async def test_case18_a_killed_servers_session_goes_on_where_it_was(rig: Rig) -> None:
    rig.engine.script = [call("ls"), "<tool_call>bad", "done"]
    _, first = await rig.chat([USER], request_id="a")
    base = [USER, answer_of(first), {"role": "tool", "content": "a.py"}]
    _, bad = await rig.chat(base, request_id="b")
    await rig.kill()
    await rig.start()
    assert await rig.chat([USER], request_id="a") == (200, first)
    assert await rig.chat(base) == (200, bad)
    assert len(rig.engine.requests) == 2
    await rig.kill()
    await rig.start()
    code, _ = await rig.chat([*base, answer_of(bad), {"role": "user", "content": "error: invalid tool call"}])
    assert code == 200
    turns = await rig.events(TurnCompleted)
    assert [(t.turn, t.parent, t.branch) for t in turns] == [(1, 0, 0), (2, 1, 0), (3, 2, 0)]
    whole = [i for t in turns[:2] for p in (t.prompt_ids, t.output_ids) for i in rig.ids(p)]
    assert rig.engine.requests[2]["input_ids"][: len(whole)] == whole
    assert len(await rig.events(SessionOpened)) == 1
    assert await rig.metric("rebuilt") == 1


async def test_case18_a_request_in_flight_at_the_kill_is_sent_again_under_its_id(rig: Rig) -> None:
    never = asyncio.Event()
    rig.engine.script = [hang(never, rig.engine)]
    lost = asyncio.create_task(rig.chat([USER], request_id="a"))
    await asyncio.wait_for(rig.engine.arrived.wait(), 5)
    await rig.kill()
    with pytest.raises(Exception):  # noqa: B017  (whatever the dead connection raises)
        await lost
    await rig.start()
    code, _ = await rig.chat([USER], request_id="a")
    never.set()
    assert code == 200
    assert rig.engine.requests[0]["rid"] == rig.engine.requests[1]["rid"]
    assert [t.turn for t in await rig.events(TurnCompleted)] == [1]


async def test_case18_opening_an_old_id_finds_the_old_session(rig: Rig) -> None:
    await rig.chat([USER], request_id="a")
    await rig.kill()
    await rig.start()
    await rig.open()
    await rig.chat([USER], request_id="a")
    assert len(rig.engine.requests) == 1
    await rig.client.close(SESSION, "done")
    await rig.kill()
    await rig.start()
    assert (await rig.client.close(SESSION, "again")).reason == "done"
    with pytest.raises(SessionError) as e:
        await rig.open()
    assert e.value.status == 409
    code, body = await rig.chat([USER])
    assert (code, body["error"]["reason"]) == (404, "closed")
    assert len(await rig.events(SessionClosed)) == 1


async def test_case18_a_truncated_session_is_still_ended_after_a_kill(make_rig: Any) -> None:
    rig = await make_rig(sampling=Sampling(max_new_tokens=2, context=512))
    await rig.open()
    rig.engine.script = ["much too long"]
    _, first = await rig.chat([USER])
    await rig.kill()
    await rig.start()
    code, body = await rig.chat([USER, answer_of(first), USER])
    assert (code, body["error"]["reason"]) == (404, "length")


async def test_a_turn_that_could_not_be_recorded_is_not_answered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = rig.bus.submit

    async def down(*_: Any, **__: Any) -> int:
        raise BusError("no receipt")

    monkeypatch.setattr(rig.bus, "submit", down)
    code, body = await rig.chat([USER], request_id="a")
    assert (code, body["error"]["boundary"]) == (503, "bus")
    monkeypatch.setattr(rig.bus, "submit", submit)
    code, _ = await rig.chat([USER], request_id="a")
    assert code == 200
    assert len(await rig.events(TurnCompleted)) == 1


async def test_s1_two_servers_never_record_two_turns_of_one_number(rig: Rig, make_rig: Any) -> None:
    other = await make_rig()
    await other.open()
    _, first = await rig.chat([USER], request_id="a")
    assert await other.chat([USER], request_id="a") == (200, first)
    assert len(rig.engine.requests) == 2  # sampled, and thrown away for the journal's
    await rig.chat([USER, answer_of(first), USER])
    code, body = await other.chat([USER, answer_of(first), {"role": "user", "content": "else"}])
    assert (code, body["error"]["boundary"]) == (503, "session")
    code, _ = await other.chat([USER, answer_of(first), {"role": "user", "content": "else"}])
    assert code == 200
    turns = await rig.events(TurnCompleted)
    assert [(t.turn, t.parent, t.branch) for t in turns] == [(1, 0, 0), (2, 1, 0), (3, 1, 1)]


async def test_sessions_of_other_attempts_of_the_group_are_left_alone(rig: Rig) -> None:
    other = "t3-g004-a2.1"
    await rig.open(other)
    await rig.chat([USER], session=other)
    await rig.kill()
    await rig.start()
    await rig.chat([USER])
    assert [(t.session, t.turn) for t in await rig.events(TurnCompleted)] == [(other, 1), (SESSION, 1)]


# ---------------------------------------------------------------------------------------------------- the merger


async def run_merger(rig: Rig, until: int) -> None:
    """One life of the merger: until the journal holds `until` samples."""
    stop = asyncio.Event()
    merger = Merger(pack=rig.bus.blobs.pack, unpack=rig.bus.blobs.unpack, replay=False, done=await merged_sessions(rig.bus))
    task = asyncio.create_task(react(rig.bus, merger, types=TYPES, stop=stop))
    async with asyncio.timeout(10):
        async for _ in rig.bus.follow(types=[TrajectoryMerged], stop=stop):
            until -= 1
            if until == 0:
                stop.set()
    await task


def verdict(rig: Rig) -> VerifierResult:
    receipt = Receipt(file="f", file_digest="d", verifier_digest="v", exit_status=0, agent_dead_at=0.0, written_at=1.0)
    return VerifierResult(
        run=rig.bus.run,
        step=3,
        attempt="t3-g004-a1",
        group=4,
        session=SESSION,
        reward=1.0,
        low=0.0,
        high=1.0,
        receipt=receipt,
        exit_status=0,
        agent_end=AgentEnd.SUBMITTED,
    )


async def test_case19_the_merger_is_resumable_and_merges_once(rig: Rig) -> None:
    rig.engine.script = [call("ls"), "done"]
    _, first = await rig.chat([USER])
    await rig.chat([USER, answer_of(first), {"role": "tool", "content": "a.py"}])
    await rig.client.close(SESSION, "submitted")
    await rig.bus.publish(verdict(rig))
    await run_merger(rig, 1)
    await run_merger(rig, 1)
    (event,) = await rig.events(TrajectoryMerged)
    sample = decode(rig.bus.blobs.unpack(event.sample))
    last = rig.engine.requests[-1]["input_ids"]
    assert sample.ids.tolist()[: len(last)] == last
    assert int(sample.mask.sum()) == event.sampled
    assert event.turns == 2
