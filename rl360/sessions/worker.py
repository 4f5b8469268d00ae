"""`rl360 worker session`: one session server."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any, Final, cast

from aiohttp import web

from rl360.bus.worker import WorkerContext
from rl360.config import Config
from rl360.sessions import door, probe, prove
from rl360.sessions.fence import Fence, keep
from rl360.sessions.generate import EngineClient
from rl360.sessions.metrics import Metrics
from rl360.sessions.routing import RoutingShape, shape_of
from rl360.sessions.server import SessionServer
from rl360.sessions.store import Store
from rl360.sessions.templates import Template
from rl360.sessions.tokenizer import TemplateError, load_tokenizer
from rl360.sessions.turning import Turns

_SWEEP: Final = 30.0
_DRAIN: Final = 2.0
_MB: Final = 1024 * 1024


async def main(ctx: WorkerContext) -> None:
    """Prove the template, then serve until `ctx.stop`. Raises TemplateError or RoutingError when the recipe can't be served.

    Turns in flight at the stop get two seconds; an agent whose turn is cut off sends it again, to this server's next life.
    """
    config = ctx.config
    template = await asyncio.to_thread(load_template, config)
    shape = load_routing(config)
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        fence = Fence()
        folding = asyncio.create_task(keep(fence, ctx.bus, ctx.stop))
        stack.callback(folding.cancel)
        client = EngineClient(ctx.addresses.gateway, deadline=config.engine.request_timeout, fence=fence)
        engine = await stack.enter_async_context(client)
        if shape is not None:
            await probe.expert_rows(engine, template, config, shape, ctx.stop)
        store = Store(ctx.bus, template, _sampling(config), metrics, seconds=config.supervise.drain_seconds)
        await store.start()
        turns = Turns(ctx.bus, store, engine, template, config, metrics, shape)
        url = ctx.addresses.sessions[ctx.index]
        server = SessionServer(
            store, turns, metrics, admin=ctx.secrets.admin, url=url, max_body=config.sessions.max_body_mb * _MB, log=ctx.log
        )
        runner = web.AppRunner(server.app, access_log=None, shutdown_timeout=_DRAIN)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        listener = await door.listen(runner, url)
        stack.callback(listener.close)
        ctx.log.info("serving %s with template %s", url, template.name)
        await _until(ctx.stop, store, folding)


def load_template(config: Config) -> Template:
    """The recipe's template for the recipe's policy, proven (S2), every id of it known to the policy's model."""
    folder = config.policy.folder
    tokenizer = load_tokenizer(folder)
    vocab = _model(config).get("vocab_size")
    if isinstance(vocab, int) and tokenizer.size > vocab:
        # An id beyond the model's vocabulary kills an engine.
        raise TemplateError(f"{folder}: the tokenizer has {tokenizer.size} tokens, the model {vocab}: they don't belong together")
    return prove.admit(config.sessions.template, tokenizer)


def load_routing(config: Config) -> RoutingShape | None:
    """The policy's experts when replay is on. Raises RoutingError when it has none."""
    return shape_of(_model(config), every_layer=config.engine.kind == "sglang") if config.engine.routed_experts else None


def _model(config: Config) -> dict[str, Any]:
    path = config.policy.folder / "config.json"
    try:
        return cast(dict[str, Any], json.loads(path.read_text()))
    except (OSError, ValueError) as e:
        raise TemplateError(f"{path}: can't be read ({e}); a policy folder is in Hugging Face layout") from None


def _sampling(config: Config) -> dict[str, float | int]:
    s = config.sampling
    return {"temperature": s.temperature, "max_new_tokens": s.max_new_tokens, "context": s.context}


async def _until(stop: asyncio.Event, store: Store, folding: asyncio.Task[None]) -> None:
    """Sweep until `stop`. Raises what ended `folding`: without it a fenced engine could answer."""
    stopping = asyncio.create_task(stop.wait())
    try:
        while not stop.is_set():
            await asyncio.wait({stopping, folding}, timeout=_SWEEP, return_when=asyncio.FIRST_COMPLETED)
            if folding.done():
                folding.result()
            store.sweep(asyncio.get_running_loop().time())
    finally:
        stopping.cancel()
