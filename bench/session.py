"""Server CPU of one turn at 1K, 10K and 58K context tokens, beside a bare proxy that moves the same bytes.

    python bench/session.py [--json] [--turns N] [--contexts N ...]

A real session server (own process, real journal) between an agent and an engine that only echoes (both in this process). A
conversation grows by about 950 tokens a turn to the context asked for; then come N short turns, whose server CPU is read from the
kernel's scheduler. The agent sends the whole conversation each turn and the engine echoes the whole prompt, so the bytes grow with the
context; `floor` is a proxy of the same HTTP library that reads and writes as many bytes and does nothing else. What this project adds
is `beyond`: it should not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from rl360.bus import nats_server
from rl360.bus.address import Addresses, Secrets
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.bus.worker import WorkerContext
from rl360.child import Child
from rl360.config import Config, Sampling
from rl360.ports import free_ports
from rl360.sessions import worker
from rl360.sessions.client import OpenSession, SessionClient
from rl360.sessions.tokenizer import load_tokenizer

ADMIN, RUN, GROWTH, CONTEXT = "bench", "bench", 950, 200_000
BIG = 512 * 2**20
Json = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- the server's process


class Setup(msgspec.Struct):
    """What the child is told."""

    url: str
    gateway: str
    nats: str
    user: str
    password: str
    blobs: str


async def serve(s: Setup) -> None:
    config = Config(sampling=Sampling(context=CONTEXT))
    async with Bus.connect(BusAddress(url=s.nats, user=s.user, password=s.password), RUN, BlobStore(Path(s.blobs))) as bus:
        ctx = WorkerContext(
            kind="session",
            index=0,
            config=config,
            dir=Path(s.blobs),
            bus=bus,
            addresses=Addresses(nats=s.nats, gateway=s.gateway, sessions=(s.url,)),
            secrets=Secrets(admin=ADMIN),
            stop=asyncio.Event(),
            log=logging.getLogger("bench"),
        )
        await worker.main(ctx)


async def floor(s: Setup) -> None:
    """Reads the agent's body, sends the engine as many bytes as it is told, reads the reply, answers shortly."""
    async with aiohttp.ClientSession() as http:

        async def pass_on(request: web.Request) -> web.Response:
            await request.read()
            async with http.post(f"{s.gateway}/bytes", data=bytes(int(request.headers["x-bytes"]))) as reply:
                await reply.read()
            return web.Response(body=b"{}")

        app = web.Application(client_max_size=BIG)
        app.add_routes([web.post("/turn", pass_on), web.get("/health", lambda _: web.Response())])  # type: ignore[arg-type]
        await listen(app, s.url)
        await asyncio.Event().wait()


async def listen(app: web.Application, url: str) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(url.rsplit(":", 1)[1])).start()


# ---------------------------------------------------------------------------------------------------- engine and agent


class Engine:
    """Echoes the prompt and says "ok"; keeps the sizes of the last request and reply."""

    def __init__(self, reply_ids: list[int]) -> None:
        self.ids = reply_ids
        self.sent = self.replied = 0

    async def generate(self, request: web.Request) -> web.Response:
        data = await request.read()
        body = msgspec.json.decode(data)
        n = len(self.ids)
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": self.ids[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": n,
            "cached_tokens": 0,
            "weight_version": "0",
            "output_token_logprobs": [[-0.5, i, None] for i in self.ids],
            "weight_versions": [{"version": "0", "start": 0, "end": n}],
        }
        reply = msgspec.json.encode({"text": "", "output_ids": self.ids, "prompt_token_ids": body["input_ids"], "meta_info": meta})
        self.sent, self.replied = len(data), len(reply)
        return web.Response(body=reply, content_type="application/json")

    async def bytes(self, request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=bytes(self.replied))


def cpu(pid: int) -> float:
    """CPU seconds of a process, all threads, by the scheduler's own count (nanoseconds)."""
    return sum(int((t / "schedstat").read_text().split()[0]) for t in Path(f"/proc/{pid}/task").iterdir()) / 1e9


class Agent:
    def __init__(self, http: aiohttp.ClientSession, base_url: str, key: str) -> None:
        self.http, self.url, self.key = http, f"{base_url}/chat/completions", key
        self.messages: list[Json] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "fix it"}]
        self.tokens = 0
        self.body = 0

    async def turn(self, observation: str) -> None:
        data = json.dumps({"model": "policy", "messages": self.messages}).encode()
        headers = {"Authorization": f"Bearer {self.key}", "x-request-id": secrets.token_hex(8)}
        async with self.http.post(self.url, data=data, headers=headers) as r:
            reply = msgspec.json.decode(await r.read())
            assert r.status == 200, reply
        self.tokens, self.body = reply["usage"]["total_tokens"], len(data)
        self.messages += [reply["choices"][0]["message"], {"role": "user", "content": observation}]


async def wait_healthy(http: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with http.get(f"{url}/health") as r:
                    if r.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


async def measure(args: argparse.Namespace) -> list[Json]:
    tokenizer = load_tokenizer(Config().policy.folder)
    engine = Engine([*tokenizer.encode("ok"), tokenizer.special("<|im_end|>")])
    server_port, floor_port, engine_port, nats_port, monitor = free_ports(5)
    gateway = f"http://127.0.0.1:{engine_port}"
    app = web.Application(client_max_size=BIG)
    app.add_routes([web.post("/generate", engine.generate), web.post("/bytes", engine.bytes)])
    await listen(app, gateway)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        passwords = {name: secrets.token_hex(8) for name in (nats_server.ADMIN, *nats_server.PUBLISHES)}
        text = nats_server.config_text(run=RUN, store=root / "store", port=nats_port, monitor_port=monitor, passwords=passwords)
        nats_server.write_config(root / "nats.conf", text)
        setup = Setup(
            url=f"http://127.0.0.1:{server_port}",
            gateway=gateway,
            nats=f"nats://127.0.0.1:{nats_port}",
            user=nats_server.ADMIN,
            password=passwords[nats_server.ADMIN],
            blobs=str(root / "blobs"),
        )
        floor_setup = msgspec.structs.replace(setup, url=f"http://127.0.0.1:{floor_port}")
        me = [sys.executable, __file__]
        children = [
            Child("nats", nats_server.command(root / "nats.conf"), root / "nats.log"),
            Child("server", [*me, "--serve", msgspec.json.encode(setup).decode()], root / "server.log"),
            Child("floor", [*me, "--floor", msgspec.json.encode(floor_setup).decode()], root / "floor.log"),
        ]
        try:
            await children[0].start()
            await nats_server.wait_healthy(monitor)
            async with Bus.connect(
                BusAddress(url=setup.nats, user=setup.user, password=setup.password), RUN, BlobStore(root / "blobs")
            ) as bus:
                await bus.create_streams()
            for child in children[1:]:
                await child.start()
            async with aiohttp.ClientSession() as http:
                await wait_healthy(http, setup.url)
                await wait_healthy(http, floor_setup.url)
                rows: list[Json] = []
                for i, context in enumerate(args.contexts):
                    agent = await grown(http, setup.url, tokenizer, context, i)
                    rows.append(await one(http, agent, engine, floor_setup.url, context, args.turns, children[1].pid, children[2].pid))
                return rows
        finally:
            for child in reversed(children):
                await child.stop(5)


async def grown(http: aiohttp.ClientSession, url: str, tokenizer: Any, context: int, index: int) -> Agent:
    """A session whose next turn has about `context` tokens."""
    name = f"t0-g000-a{index}"
    opened = await SessionClient(http, url, ADMIN).open(OpenSession(attempt=name, group=0, step=0, session=f"{name}.1"))
    agent = Agent(http, opened.base_url, opened.key)
    rng = random.Random(index)
    word = lambda: rng.choice(("return", "value", "port", "sed", "cat", "total", "= 42", "file.py", "\n"))  # noqa: E731
    text = " ".join(word() for _ in range(4000))
    per_char = len(tokenizer.encode(text)) / len(text)
    await agent.turn("start")
    while agent.tokens < context:
        want = min(GROWTH, context - agent.tokens)
        at = rng.randrange(len(text) // 2)
        await agent.turn(text[at : at + max(8, int(want / per_char))])
    return agent


async def one(
    http: aiohttp.ClientSession, agent: Agent, engine: Engine, floor_url: str, context: int, turns: int, pid: int, floor_pid: int
) -> Json:
    before = cpu(pid)
    for i in range(turns):
        await agent.turn(f"(no output) {i}")
    ours = (cpu(pid) - before) / turns
    body, headers = bytes(agent.body), {"x-bytes": str(engine.sent)}
    before = cpu(floor_pid)
    for _ in range(turns):
        async with http.post(f"{floor_url}/turn", data=body, headers=headers) as r:
            await r.read()
    bare = (cpu(floor_pid) - before) / turns
    moved = agent.body + engine.sent + engine.replied
    return {"context": context, "messages": len(agent.messages), "kb": moved / 1e3, "cpu_ms": ours * 1e3, "floor_ms": bare * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the numbers as a last line of JSON")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1_000, 10_000, 58_000])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--floor", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve or args.floor:
        asyncio.run((serve if args.serve else floor)(msgspec.json.decode(args.serve or args.floor, type=Setup)))
        return
    rows = asyncio.run(measure(args))
    print(f"{'context':>9}{'messages':>10}{'KB moved':>10}{'server CPU ms/turn':>20}{'floor':>8}{'beyond':>8}")
    for r in rows:
        beyond = r["cpu_ms"] - r["floor_ms"]
        print(f"{r['context']:9,}{r['messages']:10}{r['kb']:10.0f}{r['cpu_ms']:20.2f}{r['floor_ms']:8.2f}{beyond:8.2f}")
    if args.json:
        first, last = rows[0], rows[-1]
        ratios = {
            "cpu_growth": last["cpu_ms"] / first["cpu_ms"],
            "floor_growth": last["floor_ms"] / first["floor_ms"],
            "bytes_growth": last["kb"] / first["kb"],
            "beyond_growth": (last["cpu_ms"] - last["floor_ms"]) / (first["cpu_ms"] - first["floor_ms"]),
        }
        numbers = {f"cpu_ms_{r['context']}": round(r["cpu_ms"], 3) for r in rows}
        print(json.dumps({k: round(v, 2) for k, v in ratios.items()} | numbers))


if __name__ == "__main__":
    main()
