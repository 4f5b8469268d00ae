"""Worker kind `engine`: one generation of the tiny engine, announced once and alive as long as its lease.

A generation is one life of one process: a restart has another name and another URL, so nothing cached or routed to the old
one can reach the new one by mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncGenerator
from importlib import resources
from pathlib import Path
from typing import Final

import blake3
import msgspec
import nats.errors
import torch

from rl360.bus import events as ev
from rl360.bus.connection import BusError
from rl360.bus.worker import WorkerContext
from rl360.engines.tiny.engine import Engine, EngineOptions
from rl360.engines.tiny.server import serve

HOST: Final = "127.0.0.1"


class EngineLease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the lease `engine.<generation>`."""

    url: str
    pid: int


async def main(ctx: WorkerContext) -> None:
    """Serve until `ctx.stop`, or raise what ended the engine's thread."""
    torch.set_num_threads(1)
    generation = f"{ctx.name}-{secrets.token_hex(3)}"
    engine = Engine(options(ctx, generation))
    engine.start()
    runner, port = await serve(engine, HOST, 0)
    try:
        url = f"http://{HOST}:{port}"
        async with _lease(ctx, generation, url):
            joined = ev.EngineJoined(run=ctx.config.run.name, generation=generation, url=url, pid=os.getpid(), node=socket.gethostname())
            seq = await ctx.bus.publish(joined)
            ctx.log.info("generation %s at %s", generation, url)
            await _until_over(ctx.stop, engine.crashed, asyncio.create_task(_fenced(ctx, generation, seq)))
    finally:
        await runner.cleanup()
        engine.stop()


def options(ctx: WorkerContext, generation: str) -> EngineOptions:
    config = ctx.config
    return EngineOptions(
        model=Path(config.policy.path) if config.policy.path else Path(str(resources.files("rl360.tiny") / "policy")),
        generation=generation,
        slots=config.engine.slots,
        context=config.sampling.context,
        dtype=config.engine.dtype,
        seed=_seed(config.run.seed, generation),
        routed_experts=config.engine.routed_experts,
        timeout=config.push.timeout,
    )


def _seed(run_seed: int, generation: str) -> int:
    """A generation's own stream of random numbers: a restarted engine doesn't repeat what its forerunner drew."""
    return int.from_bytes(blake3.blake3(f"{run_seed}/{generation}".encode()).digest(7))


class Fenced(Exception):
    """Membership took this generation out: it missed a push, or its lease ran out. Its process ends; the next is a new one."""


async def _fenced(ctx: WorkerContext, generation: str, joined: int) -> None:
    """Wait until membership gives this generation up. Raises Fenced."""
    async for record in ctx.bus.follow(types=[ev.EngineFenced, ev.EngineLost], start=joined + 1, stop=ctx.stop):
        event = record.event
        if isinstance(event, ev.EngineFenced | ev.EngineLost) and event.generation == generation:
            raise Fenced(f"{generation}: {event.cause}")


async def _until_over(stop: asyncio.Event, crashed: asyncio.Future[None], fenced: asyncio.Task[None]) -> None:
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopping, crashed, fenced}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        fenced.cancel()
    for over in (crashed, fenced):
        if over.done():
            over.result()


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
