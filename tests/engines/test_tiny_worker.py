"""The worker kind `engine`: joins once, lives as long as its lease, goes quickly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rl360.bus import events as ev
from rl360.bus.address import Addresses, Secrets
from rl360.bus.client import Bus
from rl360.bus.worker import WorkerContext
from rl360.config import parse
from rl360.engines.generation import EngineLease
from rl360.engines.tiny import worker
from rl360.engines.tiny.shape import ModelError
from tests.engines.tiny_models import dense, prompt
from tests.engines.tiny_server import DEADLINE, generate_body


def context(bus: Bus, folder: Path, **sections: Any) -> WorkerContext:
    data = {"run": {"name": bus.run}, "sampling": {"context": 128, "max_new_tokens": 16}, "engine": {"lease_seconds": 1.0}}
    return WorkerContext(
        kind="engine",
        index=3,
        config=parse({**data, **sections}),
        dir=folder,
        bus=bus,
        addresses=Addresses(nats=""),
        secrets=Secrets(admin=""),
        stop=asyncio.Event(),
        log=logging.getLogger("rl360.engine3"),
    )


async def joined(bus: Bus) -> ev.EngineJoined:
    """The first generation that the journal says has joined."""
    async with asyncio.timeout(DEADLINE), bus.reader(types=[ev.EngineJoined]) as reader:
        while True:
            record = await reader.next(timeout=1.0)
            if record is not None and isinstance(record.event, ev.EngineJoined):
                return record.event


@asynccontextmanager
async def running(ctx: WorkerContext) -> AsyncIterator[ev.EngineJoined]:
    task = asyncio.create_task(worker.main(ctx))
    try:
        waiting = asyncio.create_task(joined(ctx.bus))
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        yield waiting.result()
    finally:
        ctx.stop.set()
        await asyncio.wait_for(task, 10.0)


async def test_a_generation_joins_serves_renews_and_gives_its_lease_up(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense(tmp_path / "model")
    renewed, puts, put = asyncio.Event(), list[tuple[str, float]](), bus.leases.put

    async def counted(key: str, value: bytes, ttl: float) -> None:
        await put(key, value, ttl)
        puts.append((key, ttl))
        if len(puts) == 3:
            renewed.set()

    monkeypatch.setattr(bus.leases, "put", counted)
    ctx = context(bus, tmp_path, policy={"path": str(model.folder)})
    async with running(ctx) as event:
        key = f"engine.{event.generation}"
        assert event.generation.startswith("engine3-")
        lease = await bus.leases.get(key)
        assert lease is not None
        assert msgspec.json.decode(lease, type=EngineLease).url == event.url
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{event.url}/generate", json=generate_body(prompt(5), 3)) as reply:
                assert (await reply.json())["meta_info"]["generation"] == event.generation
            async with http.post(f"{event.url}/generate", json=generate_body(prompt(100), 29)) as reply:
                assert "context length (128 tokens)" in (await reply.json())["error"]["message"]
        await asyncio.wait_for(renewed.wait(), DEADLINE)
        assert set(puts) == {(key, 1.0)}
    assert await bus.leases.get(key) is None


async def test_two_lives_are_two_generations_at_two_urls_with_two_random_streams(bus: Bus, tmp_path: Path) -> None:
    ctx = context(bus, tmp_path)  # the starting policy that is shipped
    options = [worker.options(ctx, generation) for generation in ("engine3-a", "engine3-b")]
    assert options[0].seed != options[1].seed
    assert worker.options(ctx, "engine3-a").seed == options[0].seed
    assert (options[0].model / "config.json").exists()


async def test_a_policy_that_cannot_be_served_stops_the_worker_with_the_reason(bus: Bus, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Hugging Face layout"):
        await worker.main(context(bus, tmp_path, policy={"path": str(tmp_path / "nowhere")}))


async def test_a_dead_engine_thread_ends_the_worker_so_that_it_is_restarted(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dense(tmp_path / "model")

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault in the engine")

    monkeypatch.setattr("rl360.engines.tiny.model.Model.prefill", broken)
    task = asyncio.create_task(worker.main(context(bus, tmp_path, policy={"path": str(model.folder)})))
    event = await joined(bus)
    async with aiohttp.ClientSession() as http, http.post(f"{event.url}/generate", json=generate_body(prompt(5), 3)) as reply:
        assert reply.status == 500
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(task, DEADLINE)
    assert f"engine.{event.generation}" not in await bus.leases.keys()
