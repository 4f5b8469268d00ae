"""Worker kind `engine` with `engine.kind = "sglang"`: starts a server, proves it, and holds its lease.

The server ends with this process, however that ends. A server that ends, or is silent for too long, ends this process: the next
is a new generation.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import aiohttp

from rl360.bus.worker import WorkerContext
from rl360.engines.client import EngineClient
from rl360.engines.generation import first_of, live, named, seed_of
from rl360.engines.probe import Probe
from rl360.engines.sglang.checkpoint import refuse_unservable
from rl360.engines.sglang.command import ENVIRONMENT, UNPUSHED, command
from rl360.engines.sglang.server import Server
from rl360.ports import free_ports

_STARTING: Final = 0.9
"""Share of `engine.start_seconds` after which the start has failed: before the supervisor, which only knows that it is late."""
_CALL: Final = 60.0  # seconds of one call; the first request compiles kernels
_GOODBYE: Final = 5.0  # seconds that a server gets to end by itself


async def main(ctx: WorkerContext) -> None:
    """Serve until `ctx.stop`. Raises EngineError (the server failed, or lacks a capability) or Fenced."""
    config, generation = ctx.config, named(ctx)
    refuse_unservable(config.policy.folder, generation)
    host = config.engine.sglang.host
    (port,), seed = free_ports(1, host), seed_of(config.run.seed, generation)
    line = command(config, index=ctx.index, port=port, seed=seed, python=sys.executable)
    server = Server(generation, line, ctx.dir / "logs" / f"{ctx.name}.sglang.log", {**ENVIRONMENT, **config.engine.sglang.env})
    async with aiohttp.ClientSession() as http:
        client = EngineClient(http, f"http://{host}:{port}", generation, timeout=_CALL)
        try:
            await first_of(ctx.stop.wait(), _ready(ctx, server, client))
            if not ctx.stop.is_set():
                watching = server.watch(client, seconds=config.push.timeout)
                await live(ctx, generation, client.url, server.ended(), watching)
        finally:
            await server.stop(_GOODBYE)


async def _ready(ctx: WorkerContext, server: Server, client: EngineClient) -> None:
    """Started and proven."""
    await server.start(client, seconds=_STARTING * ctx.config.engine.start_seconds, log=ctx.log)
    proving = asyncio.ensure_future(Probe(client, ctx.config, UNPUSHED).prove())
    await first_of(server.ended(), proving)
    ctx.log.info("%s: %s, proven", client.generation, proving.result().server)
