"""A fenced engine may still answer; nobody listens to it."""

from __future__ import annotations

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.engines.contract import SamplingParams
from rl360.sessions.fence import Fence
from rl360.sessions.generate import EngineClient, body
from tests.sessions.fake_engine import FakeEngine


async def test_replies_of_a_fenced_generation_are_refused_and_asked_for_again() -> None:
    fence = Fence()
    for event in (
        ev.EngineFenced(run="r", generation="old-1", cause="missed a push"),
        ev.EngineLost(run="r", generation="old-2", cause="lease"),
    ):
        fence.on(Recorded(1, 0.0, event))
    engine = FakeEngine()
    engine.script = [lambda b: engine.reply(b, "a", generation="old-1"), lambda b: engine.reply(b, "b", generation="old-2"), "c"]
    await engine.start()
    try:
        async with EngineClient(engine.url, deadline=10.0, fence=fence) as client:
            answer = await client.call(
                lambda n: body(b"5,6", rid=f"x.{n}.", params=SamplingParams(), routed_from=None),
                {},
                lambda reply: reply.meta_info.generation,
            )
    finally:
        await engine.stop()
    assert answer.value == "fake-1"
    assert [r["rid"] for r in engine.requests] == ["x.0.", "x.1.", "x.2."]
