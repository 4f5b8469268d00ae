from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rl360.bus.address import Addresses, Secrets
from rl360.bus.client import Bus
from rl360.bus.events import Event
from rl360.bus.worker import WorkerContext
from rl360.config import Config, Engine, Policy, Sampling, Sessions
from rl360.ports import free_ports
from rl360.sessions import worker
from rl360.sessions.client import OpenSession, SessionClient
from rl360.sessions.names import session_key
from rl360.sessions.templates import Template, get_template, load_tokenizer
from tests.sessions.fake_engine import FakeEngine
from tests.sessions.tokens import policy_folder

ADMIN = "admin-key"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
SESSION = "t3-g004-a1.1"


class Rig:
    """A session server over a real bus and a scripted engine; `kill` and `start` make its next life."""

    def __init__(self, bus: Bus, engine: FakeEngine, http: aiohttp.ClientSession, folder: Path, model: dict[str, Any]) -> None:
        self.bus, self.engine, self.http = bus, engine, http
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        self.config = Config(
            policy=Policy(path=str(policy_folder(folder / "policy", **model))),
            sampling=Sampling(max_new_tokens=64, context=512),
            engine=Engine(request_timeout=2.0),
        )
        self.folder = folder
        self.gateway = engine.url
        self.client = SessionClient(http, self.url, ADMIN, seconds=5)
        self._task: asyncio.Task[None] | None = None

    def set(self, **sections: Any) -> None:
        self.config = msgspec.structs.replace(self.config, **sections)

    async def start(self) -> None:
        ctx = WorkerContext(
            kind="session",
            index=0,
            config=self.config,
            dir=self.folder,
            bus=self.bus,
            addresses=Addresses(nats="", gateway=self.gateway, sessions=(self.url,)),
            secrets=Secrets(admin=ADMIN),
            stop=asyncio.Event(),
            log=logging.getLogger("session"),
        )
        self.stop = ctx.stop
        self._task = asyncio.create_task(worker.main(ctx))
        async with asyncio.timeout(20):
            while not await self._healthy():
                if self._task.done():
                    await self._task
                await asyncio.sleep(0.01)

    async def _healthy(self) -> bool:
        try:
            async with self.http.get(self.url + "/health") as r:
                return r.status == 200
        except aiohttp.ClientError:
            return False

    async def kill(self) -> None:
        """As kill -9: no drain."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task], timeout=10)
        self._task = None

    async def open(self, session: str = SESSION, **more: Any) -> None:
        attempt, _, _ = session.rpartition(".")
        step, group = int(attempt.split("-")[0][1:]), int(attempt.split("-")[1][1:])
        await self.client.open(OpenSession(attempt=attempt, step=step, group=group, session=session, **more))

    async def chat(
        self, messages: Any, *, session: str = SESSION, request_id: str = "", key: str = "", tools: Sequence[Any] = (BASH,), **more: Any
    ) -> tuple[int, Any]:
        """Status and parsed body of one chat completion."""
        headers = {"Authorization": f"Bearer {key or session_key(ADMIN, session)}"}
        if request_id:
            headers["x-request-id"] = request_id
        body = {"model": "policy", "messages": messages, "tools": list(tools), **more}
        async with self.http.post(f"{self.url}/sessions/{session}/v1/chat/completions", json=body, headers=headers) as r:
            return r.status, json.loads(await r.read())

    async def post(self, data: bytes, session: str = SESSION) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {session_key(ADMIN, session)}", "Content-Type": "application/json"}
        async with self.http.post(f"{self.url}/sessions/{session}/v1/chat/completions", data=data, headers=headers) as r:
            return r.status, json.loads(await r.read())

    async def events(self, *types: type[Event]) -> list[Any]:
        return [r.event async for r in self.bus.replay(types=types)]

    async def metric(self, name: str) -> int:
        async with self.http.get(self.url + "/metrics") as r:
            lines = (await r.text()).splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith(f"rl360_session_{name}_total "))

    def ids(self, payload: Any) -> list[int]:
        return memoryview(self.bus.blobs.unpack(payload)).cast("i").tolist()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine()
    await fake.start()
    yield fake
    await fake.stop()


@cache
def unproven(name: str, folder: Path) -> Template:
    """A fixed template without its proof, which takes a second and has tests of its own."""
    return get_template(name, load_tokenizer(folder))


@pytest.fixture
async def make_rig(
    bus: Bus, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[Rig]]]:
    """Start a server with some sections of the recipe replaced."""
    monkeypatch.setattr(worker, "_DRAIN", 0.01)  # `kill` is a kill
    monkeypatch.setattr(worker, "load_template", lambda config: unproven(config.sessions.template, config.policy.folder))
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def make(*, gateway: str = "", model: dict[str, Any] | None = None, **sections: Any) -> Rig:
            rig = Rig(bus, engine, http, tmp_path, model or {})
            rig.gateway = gateway or engine.url
            rig.set(**sections)
            stack.push_async_callback(rig.kill)
            await rig.start()
            return rig

        yield make


@pytest.fixture
async def rig(make_rig: Callable[..., Awaitable[Rig]]) -> Rig:
    rig = await make_rig(sessions=Sessions(max_body_mb=1))
    await rig.open()
    return rig
