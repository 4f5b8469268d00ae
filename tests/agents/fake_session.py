"""A session server of a test: the routes a runner and an agent use, with a policy that is a function of the messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]
ADMIN = "admin-key"


def call(command: str, *, name: str = "bash", id: str = "call_1") -> Json:
    """An assistant message that runs a command."""
    function = {"name": name, "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def text(content: str) -> Json:
    return {"role": "assistant", "content": content, "refusal": None}


def turns(*messages: Json) -> Callable[[list[Json]], Json]:
    """A policy that says these, one a turn."""
    return lambda history: messages[sum(m["role"] == "assistant" for m in history)]


SUBMIT = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@dataclass
class FakeSession:
    """`trouble` answers a request before the policy does: a status with an error body, "drop", or "hang"; one a request."""

    policy: Callable[[list[Json]], Json]
    trouble: list[Json | str] = field(default_factory=list)
    requests: list[Json] = field(default_factory=list)  # messages and request id of each try
    opened: list[str] = field(default_factory=list)
    closed: list[tuple[str, str]] = field(default_factory=list)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    refuse_close: bool = False
    lists: int = 0  # times that somebody asked for the models

    async def __aenter__(self) -> FakeSession:
        app = web.Application(client_max_size=32 << 20)
        app.router.add_post("/sessions", self._open)
        app.router.add_delete("/sessions/{id}", self._close)
        app.router.add_post("/sessions/{id}/v1/chat/completions", self._chat)
        app.router.add_get("/sessions/{id}/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def base_url(self, session: str = "t0-g000-a0.1") -> str:
        return f"{self.url}/sessions/{session}/v1"

    async def _open(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {ADMIN}"
        body = await request.json()
        self.opened.append(body["session"])
        return web.json_response({"session": body["session"], "base_url": self.base_url(body["session"]), "key": f"key-{body['session']}"})

    async def _close(self, request: web.Request) -> web.Response:
        if self.refuse_close:
            return web.json_response({"error": {"message": "the journal is away"}}, status=503)
        session, reason = request.match_info["id"], (await request.json())["reason"]
        self.closed.append((session, reason))
        return web.json_response({"session": session, "reason": reason, "turns": 1, "branches": 1})

    async def _models(self, _: web.Request) -> web.Response:
        self.lists += 1
        return web.json_response({"object": "list", "data": [{"id": "policy"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        record = {k: request.headers.get(k) for k in ("x-request-id", "authorization", "traceparent")}
        self.requests.append({**record, "messages": body["messages"], "tools": body.get("tools")})
        match self.trouble.pop(0) if self.trouble else None:
            case "drop":
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            case "hang":
                self.hanging.set()
                await asyncio.sleep(60)
            case {"status": int(status), **error}:
                return web.json_response({"error": error}, status=status)
            case _:
                pass
        message = self.policy(body["messages"])
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        return web.json_response({"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish}]})
