"""The membership worker between a real journal and the real SMG."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from rl360.bus import events as ev
from rl360.bus.address import Addresses, Secrets
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus
from rl360.bus.connection import BusError
from rl360.bus.worker import WorkerContext
from rl360.config import Config, Engine, Run
from rl360.engines import gateway, membership_worker
from rl360.engines.membership import Member, State

LEASE_SECONDS = 1.0


class World:
    """One run: its journal, its gateway, and a membership worker that can be started again."""

    def __init__(self, bus: Bus, smg: Any, front: Any, folder: Path) -> None:
        self.bus, self.smg, self.front = bus, smg, front
        self.context = WorkerContext(
            kind="membership",
            index=0,
            config=Config(run=Run(name=bus.run), engine=Engine(lease_seconds=LEASE_SECONDS)),
            dir=folder,
            bus=bus,
            addresses=Addresses(nats="", gateway=smg.url),
            secrets=Secrets(admin=""),
            stop=asyncio.Event(),
            log=logging.getLogger("membership"),
        )
        self.task: asyncio.Task[None] | None = None
        self.beats: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        self.context.stop.clear()
        self.task = asyncio.create_task(membership_worker.main(self.context))

    async def stop(self) -> None:
        self.context.stop.set()
        if self.task is not None:
            await asyncio.wait_for(self.task, 10)

    async def crash(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])
        self.task = None

    async def join(self, engine: Any, pid: int = 0) -> None:
        async def beat() -> None:
            while True:
                with contextlib.suppress(BusError, nats.errors.Error):
                    await self.bus.leases.put(f"engine.{engine.name}", b"{}", LEASE_SECONDS)
                await asyncio.sleep(LEASE_SECONDS / 3)

        self.beats[engine.name] = asyncio.create_task(beat())
        await self.bus.publish(
            ev.EngineJoined(run=self.bus.run, generation=engine.name, url=engine.url, pid=pid, node=socket.gethostname())
        )

    async def push(self, version: int, **ok: bool) -> None:
        results = tuple(ev.PushResult(generation=g, ok=good, checksum="c" if good else "") for g, good in ok.items())
        event = ev.WeightsPushed(
            run=self.bus.run,
            step=version,
            version=version,
            plan="p",
            path="broadcast",
            attempt=1,
            checksum="c",
            results=results,
            pause_seconds=0,
            seconds=0,
        )
        await self.bus.publish(event)

    async def said(self, kind: type[ev.Event]) -> list[Any]:
        return [r.event async for r in self.bus.replay(types=[kind])]

    async def until_said(self, kind: type[ev.Event], generation: str) -> Any:
        async with asyncio.timeout(15):
            while True:
                found = [e for e in await self.said(kind) if e.generation == generation]
                if found:
                    return found[0]
                await asyncio.sleep(0.05)


@pytest.fixture
async def world(bus: Bus, smg: Any, front: Any, tmp_path: Path) -> AsyncIterator[World]:
    world = World(bus, smg, front, tmp_path)
    world.start()
    yield world
    for beat in world.beats.values():
        beat.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await world.stop()


async def test_case27_an_engine_is_registered_after_its_first_completed_push(world: World, echo: Any) -> None:
    a, b = await echo("a"), await echo("b")
    await world.join(a)
    await world.join(b)
    await world.push(0, a=True)
    await world.until_said(ev.EngineReady, "a")
    await world.front.until(a.url)
    assert await world.front.engine_of("s") == "a"


async def test_a_fenced_engine_is_removed(world: World, echo: Any) -> None:
    a, b = await echo("a"), await echo("b")
    await world.join(a)
    await world.join(b)
    await world.push(0, a=True, b=True)
    await world.front.until(a.url, b.url)
    await world.push(1, a=True, b=False)
    await world.front.until(a.url)
    assert (await world.until_said(ev.EngineFenced, "b")).cause.startswith("push of version 1")


async def test_case33_a_dead_process_is_removed_at_once(world: World, echo: Any) -> None:
    a, b = await echo("a"), await echo("b")
    process = await asyncio.create_subprocess_exec("sleep", "60")
    await world.join(a, pid=process.pid)
    await world.join(b)
    await world.push(0, a=True, b=True)
    await world.front.until(a.url, b.url)
    process.kill()
    async with asyncio.timeout(LEASE_SECONDS + 2):
        await world.front.until(b.url)
    await process.wait()
    assert (await world.until_said(ev.EngineLost, "a")).cause == "its process is gone"


async def test_case28_an_engine_whose_lease_runs_out_is_lost(world: World, echo: Any) -> None:
    a = await echo("a")
    await world.join(a)
    await world.push(0, a=True)
    await world.front.until(a.url)
    world.beats["a"].cancel()
    assert "no lease" in (await world.until_said(ev.EngineLost, "a")).cause
    await world.front.until()


async def test_after_a_kill_of_the_gateway_everything_ready_is_registered_again(world: World, echo: Any) -> None:
    a, b, joining = await echo("a"), await echo("b"), await echo("c")
    for engine in (a, b, joining):
        await world.join(engine)
    await world.push(0, a=True, b=True)
    await world.front.until(a.url, b.url)
    world.smg.kill()
    world.smg.start()
    await gateway.wait_ready(world.smg.url, 30)
    await world.front.until(a.url, b.url)
    assert await world.said(ev.EngineLost) == []


async def test_a_restarted_membership_removes_nobody_and_says_nothing_twice(world: World, echo: Any) -> None:
    a, b = await echo("a"), await echo("b")
    await world.join(a)
    await world.join(b)
    await world.push(0, a=True, b=True)
    await world.front.until(a.url, b.url)
    await world.until_said(ev.EngineReady, "b")
    before = {w.id for w in await world.front.api.workers()}
    await world.crash()
    await world.push(1, a=True, b=False)  # decided on by the next life
    world.start()
    await world.until_said(ev.EngineFenced, "b")
    await world.front.until(a.url)
    assert {w.id for w in await world.front.api.workers()} <= before
    assert [e.generation for e in await world.said(ev.EngineReady)] == ["a", "b"]


async def test_a_bus_that_was_away_costs_no_engine(own_nats: Any, smg: Any, front: Any, echo: Any, tmp_path: Path) -> None:
    """Leases run out while nats-server is dead; engines get the grace to renew them, and their traffic goes on."""
    a = await echo("a")
    async with Bus.connect(own_nats.address(), "test", BlobStore(tmp_path / "blobs")) as bus:
        await bus.create_streams()
        world = World(bus, smg, front, tmp_path)
        world.start()
        await world.join(a)
        await world.push(0, a=True)
        await front.until(a.url)
        own_nats.kill()
        await asyncio.wait([*world.beats.values()], timeout=2 * LEASE_SECONDS)
        assert await front.engine_of("s") == "a"
        await asyncio.to_thread(own_nats.start)
        await world.push(1, a=True)
        await asyncio.wait([*world.beats.values()], timeout=2 * LEASE_SECONDS)
        assert await front.engine_of("s") == "a" and await world.said(ev.EngineLost) == []
        world.beats["a"].cancel()
        await world.until_said(ev.EngineLost, "a")
        await world.stop()


def test_only_processes_of_this_node_are_looked_at() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait(10)
    here = Member("here", "u", process.pid, "n")
    members = [here, Member("there", "u", process.pid, "other"), Member("unknown", "u", 0, "n"), Member("lost", "u", process.pid, "n")]
    members[3].state = State.LOST
    assert list(membership_worker.gone(members, node="n")) == ["here"]
