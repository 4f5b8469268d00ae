"""A stand-in for an engine: the update endpoints over a real gloo group, no model. Faults on order.

Run as a script it is a nursery: it imports torch once and forks an engine for every line on its stdin ("PORT" or "PORT VERSION"), answering
with the engine's pid. When its stdin closes it kills all of them.

`POST /_fault {"at": path, "how": die | hang | refuse | corrupt | flaky, "call": n}` sets what happens at the n-th call of a
path (from now on; `flaky`: refuse that one call only); `GET /_state` tells what the engine has seen.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
from aiohttp import web
from torch._C._distributed_c10d import BroadcastOptions

from rl360.engines import collective
from rl360.engines.checksum import checksum_of
from rl360.engines.sglang.checksum import checksums

TIMEOUT = timedelta(seconds=6)


class FakeEngine:
    """Named "rl360-tiny …" it speaks as the tiny engine does; named as a release of SGLang it has what that release has."""

    def __init__(self, version: str) -> None:
        self.name = version
        self.weights: dict[str, torch.Tensor] = {}
        self.groups: dict[str, Any] = {}
        self.version = "0"
        self.labels: list[str] = []
        self.paused = False
        self.mode = ""
        self.calls: list[str] = []
        self.fault: dict[str, Any] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self.watch])
        post = {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/init_weights_update_group": self.join,
            "/destroy_weights_update_group": self.leave,
            "/update_weights_from_distributed": self.update,
            "/update_weight_version": self.label,
            "/weights_checker": self.checksum,
            "/_fault": self.set_fault,
        }
        if self.name != "0.5.17":
            post |= {"/begin_weight_update": self.done, "/end_weight_update": self.done}
        app.add_routes([web.post(path, handler) for path, handler in post.items()])
        app.add_routes([web.get("/server_info", self.info), web.get("/_state", self.state)])
        return app

    @web.middleware
    async def watch(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not request.path.startswith("/_") and request.method == "POST":
            self.calls.append(request.path)
        if request.path == self.fault.get("at"):
            self.fault["call"] -= 1
            if self.fault["call"] <= 0:
                match self.fault["how"]:
                    case "die":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "hang":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    case "refuse":
                        return web.json_response({"success": False, "message": "no"}, status=400)
                    case "flaky":
                        self.fault = {}
                        return web.json_response({"success": False, "message": "not now"}, status=400)
                    case _:
                        pass
        return await handler(request)

    async def done(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": ""})

    async def pause(self, request: web.Request) -> web.Response:
        self.paused = True
        self.mode = (await request.json())["mode"]
        return web.json_response({"status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def join(self, request: web.Request) -> web.Response:
        body = await request.json()

        def connect() -> Any:
            host, port, rank = body["master_address"], body["master_port"], body["rank_offset"]
            return collective.join(host, port, body["group_name"], rank, body["world_size"], backend="gloo", timeout=TIMEOUT)

        try:
            self.groups[body["group_name"]] = await asyncio.to_thread(connect)
        except RuntimeError as e:
            return web.json_response({"success": False, "message": str(e)[:200]}, status=400)
        return await self.done(request)

    async def leave(self, request: web.Request) -> web.Response:
        known = self.groups.pop((await request.json())["group_name"], None) is not None
        return web.json_response({"success": known, "message": ""}, status=200 if known else 400)

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        sizes = [torch.Size(s).numel() * getattr(torch, d).itemsize for s, d in zip(body["shapes"], body["dtypes"], strict=True)]
        flat = torch.zeros(sum(sizes), dtype=torch.uint8)
        group = self.groups.get(body["group_name"])
        if group is None:
            return web.json_response({"success": False, "message": "unknown group"}, status=400)

        def receive() -> None:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            group.broadcast([flat], options).wait(TIMEOUT)

        try:
            await asyncio.to_thread(receive)
        except RuntimeError as e:
            return web.json_response({"success": False, "message": str(e)[:200]}, status=400)
        if self.fault.get("how") == "corrupt":
            flat[0] ^= 1
        for name, dtype, shape, part in zip(body["names"], body["dtypes"], body["shapes"], flat.split(sizes), strict=True):
            self.weights[name] = part.clone().view(getattr(torch, dtype)).reshape(shape)
        return await self.done(request)

    async def label(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        self.labels.append(self.version)
        return await self.done(request)

    async def checksum(self, request: web.Request) -> web.Response:
        tiny = self.name.startswith("rl360-tiny")
        sums = [checksum_of(self.weights.items())] if tiny else checksums(self.weights, kind="fused_cpu", tp=1, ep=1)
        return web.json_response({"success": True, "ranks": [{"checksums": rank} for rank in sums]})

    async def info(self, request: web.Request) -> web.Response:
        info = {"model_path": "fake", "served_model_name": "fake", "max_total_num_tokens": 8, "max_req_input_len": 8}
        return web.json_response({**info, "version": self.name, "device": "cpu"})

    async def set_fault(self, request: web.Request) -> web.Response:
        self.fault = {"call": 1, **(await request.json())}
        return web.json_response({})

    async def state(self, request: web.Request) -> web.Response:
        seen = {"version": self.version, "labels": self.labels, "paused": self.paused, "mode": self.mode, "calls": self.calls}
        return web.json_response({**seen, "groups": list(self.groups)})


def nursery() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaped by themselves: a killed engine leaves no zombie
    children: list[int] = []
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(0)
            port, _, version = line.strip().partition(" ")
            web.run_app(FakeEngine(version or "rl360-tiny fake").app(), host="127.0.0.1", port=int(port), print=None, handle_signals=False)
            os._exit(0)
        children.append(child)
        print(child, flush=True)
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    nursery()
