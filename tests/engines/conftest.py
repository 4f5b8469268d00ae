"""The real SMG, and engines that only echo."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rl360.engines import gateway
from rl360.engines.gateway import GatewayClient
from rl360.ports import free_ports


class Smg:
    """SMG in a process group of its own; can be killed and started again at the same port, forgetting everything."""

    def __init__(self, log: Path) -> None:
        (self.port, self.metrics), self.log = free_ports(2), log  # two different ones
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = gateway.command("127.0.0.1", self.port, self.metrics, request_timeout=30)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


@pytest.fixture(scope="module")
def smg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smg]:
    smg = Smg(tmp_path_factory.mktemp("smg") / "smg.log")
    smg.start()
    asyncio.run(gateway.wait_ready(smg.url, 30))
    yield smg
    smg.kill()


class Echo:
    """An engine that answers `reply` and remembers what it was sent. `hold` keeps requests waiting, `die` drops them."""

    def __init__(self, name: str) -> None:
        self.name, (self.port,) = name, free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.reply = b'{ "engine":"' + name.encode() + b'", "pi": 3.1400, "u":"\\u00e9" }'
        self.requests: list[tuple[bytes, dict[str, str]]] = []
        self.arrived, self.going = asyncio.Event(), asyncio.Event()
        self.going.set()
        self.die = False
        self.healthy = True

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.get("/health", self._health), web.get("/v1/models", self._models), web.post("/generate", self._generate)])
        app.add_routes([web.get("/server_info", self._info), web.get("/model_info", self._info)])
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "x"}]})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "tiny", "served_model_name": "tiny", "weight_version": "0", "is_generation": True})

    async def _generate(self, request: web.Request) -> web.Response:
        self.requests.append((await request.read(), dict(request.headers)))
        self.arrived.set()
        await self.going.wait()
        if self.die and request.transport is not None:
            request.transport.abort()
        return web.Response(body=self.reply, content_type="application/json")


class Front:
    """What a session server does: POST /generate through the gateway."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url
        self.api = GatewayClient(http, url, timeout=5)

    async def generate(self, key: str, body: bytes = b"{}", **headers: str) -> tuple[int, bytes]:
        headers = {gateway.ROUTING_KEY: key, "Content-Type": "application/json", **headers}
        async with self.http.post(self.url + "/generate", data=body, headers=headers) as reply:
            return reply.status, await reply.read()

    async def engine_of(self, key: str) -> str:
        status, content = await self.generate(key)
        assert status == 200, content
        return content.split(b'"')[3].decode()

    async def key_on(self, engine: str) -> str:
        """A session that is pinned to this engine."""
        for key in map(str, range(100)):
            if await self.engine_of(key) == engine:
                return key
        raise AssertionError(f"no session went to {engine}")

    async def until(self, *urls: str) -> None:
        """Wait until exactly these are listed as ready."""
        async with asyncio.timeout(15):
            while {w.url for w in await self.api.workers() if w.status == "ready"} != set(urls):
                await asyncio.sleep(0.02)


@pytest.fixture
async def front(smg: Smg) -> AsyncIterator[Front]:
    async with aiohttp.ClientSession() as http:
        front = Front(http, smg.url)
        yield front
        for worker in await front.api.workers():
            await front.api.remove(worker.id)


@pytest.fixture
async def echo() -> AsyncIterator[Any]:
    """`await echo(name)`: a running engine."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str) -> Echo:
            engine = Echo(name)
            await engine.start()
            stack.push_async_callback(engine.runner.cleanup)
            return engine

        yield start
