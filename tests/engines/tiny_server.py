"""A tiny engine behind its HTTP server, in this process, and a client for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rl360.engines.tiny.engine import Engine, EngineOptions
from rl360.engines.tiny.server import serve
from tests.engines.tiny_models import Oracle

DEADLINE = 30.0


class Client:
    """Plain JSON over HTTP, as any caller would send it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, engine: Engine) -> None:
        self.url, self.session, self.engine = url, session, engine

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body if body is not None else {}) as reply:
            return reply.status, await _body(reply)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as reply:
            return reply.status, await _body(reply)

    async def generate(self, ids: list[int], max_new: int = 8, **more: Any) -> Any:
        status, body = await self.post("/generate", generate_body(ids, max_new, **more))
        assert status == 200, body
        return body

    async def metric(self, name: str) -> float:
        _, text = await self.get("/metrics")
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"rl360_engine_{name}{{"))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the engine's thread, step by step, until `condition` holds there."""
        async with asyncio.timeout(DEADLINE):
            while not await self.engine.call(condition):
                await asyncio.sleep(0)

    async def frozen(self, rid: str, body: dict[str, Any], tokens: int) -> asyncio.Task[Any]:
        """A request that has sampled exactly `tokens` tokens on an engine that is paused in place."""
        scheduler = self.engine.scheduler

        def advance() -> None:
            scheduler.resume()
            for _ in range(tokens):
                scheduler.step()
            scheduler.pause("in_place")

        await self.engine.call(lambda: scheduler.pause("in_place"))
        task = asyncio.create_task(self.post("/generate", {**body, "rid": rid}))
        await self.until(lambda: rid in scheduler.waiting)
        await self.engine.call(advance)
        assert len(scheduler.running[rid].logprobs) == tokens
        return task


async def _body(reply: aiohttp.ClientResponse) -> Any:
    return await (reply.json() if reply.content_type == "application/json" else reply.text())


def generate_body(ids: list[int], max_new: int = 8, *, sampling: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": max_new, "ignore_eos": True, **(sampling or {})}
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True, **more}


@asynccontextmanager
async def tiny_server(oracle: Oracle, **options: Any) -> AsyncIterator[Client]:
    engine = Engine(EngineOptions(model=oracle.folder, generation="engine0-test", **{"slots": 8, "timeout": DEADLINE, **options}))
    engine.start()
    runner, port = await serve(engine, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE)) as session:
            yield Client(f"http://127.0.0.1:{port}", session, engine)
    finally:
        await runner.cleanup()
        engine.stop()
