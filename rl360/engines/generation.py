"""One generation of an engine: announced once, alive as long as its lease, over when membership gives it up.

A generation is one life of one process: a restart has another name and another URL, so nothing cached or routed to the old
one can reach the new one by mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable

import blake3
import msgspec
import nats.errors

from rl360.bus import events as ev
from rl360.bus.connection import BusError
from rl360.bus.worker import WorkerContext


class EngineLease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the lease `engine.<generation>`."""

    url: str
    pid: int


class Fenced(Exception):
    """Membership took this generation out: it missed a push, or its lease ran out. Its process ends; the next is a new one."""


def named(ctx: WorkerContext) -> str:
    """A new generation's name."""
    return f"{ctx.name}-{secrets.token_hex(3)}"


def seed_of(run_seed: int, generation: str) -> int:
    """A generation's own stream of random numbers: a restarted engine doesn't repeat what its forerunner drew. 31 bits."""
    return int.from_bytes(blake3.blake3(f"{run_seed}/{generation}".encode()).digest(4)) >> 1


async def live(ctx: WorkerContext, generation: str, url: str, *ends: Awaitable[None]) -> None:
    """Join and hold the lease until `ctx.stop`. Raises what one of `ends` raises, or Fenced."""
    async with _lease(ctx, generation, url):
        joined = ev.EngineJoined(run=ctx.config.run.name, generation=generation, url=url, pid=os.getpid(), node=socket.gethostname())
        seq = await ctx.bus.publish(joined)
        ctx.log.info("generation %s at %s", generation, url)
        await first_of(ctx.stop.wait(), _fenced(ctx, generation, seq), *ends)


async def first_of(*waits: Awaitable[object]) -> None:
    """Until one of them ends; raises what it raised. The others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


async def _fenced(ctx: WorkerContext, generation: str, joined: int) -> None:
    """Wait until membership gives this generation up. Raises Fenced."""
    async for record in ctx.bus.follow(types=[ev.EngineFenced, ev.EngineLost], start=joined + 1, stop=ctx.stop):
        event = record.event
        if isinstance(event, ev.EngineFenced | ev.EngineLost) and event.generation == generation:
            raise Fenced(f"{generation}: {event.cause}")


@contextlib.asynccontextmanager
async def _lease(ctx: WorkerContext, generation: str, url: str) -> AsyncGenerator[None]:
    """Hold the generation's lease; it is given up at the end, so that membership needn't wait for it to run out."""
    key = f"engine.{generation}"
    value = msgspec.json.encode(EngineLease(url=url, pid=os.getpid()))
    ttl = ctx.config.engine.lease_seconds
    await ctx.bus.leases.put(key, value, ttl)
    renewing = asyncio.create_task(_renew(ctx, key, value, ttl))
    try:
        yield
    finally:
        renewing.cancel()
        try:
            await asyncio.wait_for(ctx.bus.leases.delete(key), 2.0)
        except (TimeoutError, BusError, nats.errors.Error) as e:
            ctx.log.warning("lease %s was not given up, it runs out by itself: %r", key, e)


async def _renew(ctx: WorkerContext, key: str, value: bytes, ttl: float) -> None:
    """Renew four times a lease's life. A bus that is away is not the engine's end: the next try may find it back."""
    while True:
        await asyncio.sleep(ttl / 4)
        try:
            await asyncio.wait_for(ctx.bus.leases.put(key, value, ttl), ttl)
        except (TimeoutError, BusError, nats.errors.Error) as e:
            ctx.log.warning("lease %s was not renewed: %r", key, e)
