"""A scripted engine: answers `/generate` with what the test says, and keeps what it was sent."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from tests.sessions.tokens import tokenizer

Json = dict[str, Any]


def ids_of(text: str, *, stop: bool = True) -> list[int]:
    """Tokens that a policy samples to say `text`; tags in it are tags."""
    tk = tokenizer()
    return tk.encode_marked(text) + ([tk.special("<|im_end|>")] if stop else [])


def call(command: str) -> str:
    return '<tool_call>\n{"name": "bash", "arguments": ' + json.dumps({"command": command}) + "}\n</tool_call>"


@dataclass
class FakeEngine:
    """`script`: text of each reply in order (then "ok"), or a callable on the request that gives a whole reply."""

    script: list[str | Callable[[Json], Json] | Callable[[Json], Awaitable[web.Response]]] = field(default_factory=list)
    version: str = "0"
    routing: tuple[int, int, int] | None = None  # layers, top-k, experts
    requests: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 * 2**20)
        app.add_routes([web.post("/generate", self._generate)])
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        self.arrived.set()
        step = self.script.pop(0) if self.script else "ok"
        if isinstance(step, str):
            return web.json_response(self.reply(body, step))
        result = step(body)
        return await result if asyncio.iscoroutine(result) else web.json_response(result)

    def reply(self, body: Json, text: str = "ok", **changes: Any) -> Json:
        """A correct reply, with changes to its meta_info (or, by name, to `output_ids` and `prompt_token_ids`)."""
        sampled = ids_of(text)
        room = body["sampling_params"]["max_new_tokens"]
        finish: Json = {"type": "stop", "matched": sampled[-1]}
        if len(sampled) > room:
            sampled, finish = sampled[:room], {"type": "length", "length": room}
        top = {k: changes.pop(k) for k in ("output_ids", "prompt_token_ids") if k in changes}
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(sampled),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5 - i / 8, t, None] for i, t in enumerate(sampled)],
            "weight_versions": [{"version": self.version, "start": 0, "end": len(sampled)}],
            "generation": "fake-1",
        }
        if self.routing and body.get("return_routed_experts"):
            meta["routed_experts"] = self.rows(body, sampled)
        return {"text": text, "output_ids": sampled, "prompt_token_ids": body["input_ids"], "meta_info": {**meta, **changes}, **top}

    def rows(self, body: Json, sampled: list[int], start: int | None = None) -> str:
        """Expert rows that depend on the place of a token alone."""
        assert self.routing is not None
        layers, topk, experts = self.routing
        first = body.get("routed_experts_start_len", 0) if start is None else start
        n = len(body["input_ids"]) + len(sampled) - 1
        rows = [[[(row + layer + k) % experts for k in range(topk)] for layer in range(layers)] for row in range(first, n)]
        return base64.b64encode(np.array(rows, "<i4").tobytes()).decode()


def status(code: int, body: str = "no worker") -> Callable[[Json], Awaitable[web.Response]]:
    async def answer(_: Json) -> web.Response:
        return web.Response(status=code, text=body)

    return answer


def hang(release: asyncio.Event, engine: FakeEngine, text: str = "ok") -> Callable[[Json], Awaitable[web.Response]]:
    """Answer once `release` is set."""

    async def answer(body: Json) -> web.Response:
        async with asyncio.timeout(20):
            await release.wait()
        return web.json_response(engine.reply(body, text))

    return answer
