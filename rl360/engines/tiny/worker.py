"""Worker kind `engine` with `engine.kind = "tiny"`: one generation of the tiny engine, in this process."""

from __future__ import annotations

import torch

from rl360.bus.worker import WorkerContext
from rl360.engines.generation import live, named, seed_of
from rl360.engines.tiny.engine import Engine, EngineOptions
from rl360.engines.tiny.server import serve


async def main(ctx: WorkerContext) -> None:
    """Serve until `ctx.stop`, or raise what ended the engine's thread."""
    torch.set_num_threads(1)
    generation = named(ctx)
    engine = Engine(options(ctx, generation))
    engine.start()
    runner, port = await serve(engine, ctx.listen, 0)
    try:
        await live(ctx, generation, f"http://{ctx.host}:{port}", engine.crashed)
    finally:
        await runner.cleanup()
        engine.stop()


def options(ctx: WorkerContext, generation: str) -> EngineOptions:
    config = ctx.config
    return EngineOptions(
        model=config.policy.folder,
        generation=generation,
        slots=config.engine.slots,
        context=config.sampling.context,
        dtype=config.engine.dtype,
        seed=seed_of(config.run.seed, generation),
        routed_experts=config.engine.routed_experts,
        timeout=config.push.timeout,
        ep=config.engine.ep,
    )
