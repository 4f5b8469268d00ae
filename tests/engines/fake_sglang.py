"""A stand-in for `python -m sglang.launch_server`: takes its command line, serves the tiny engine under SGLang's name.

What goes wrong with it is named by FAKE_SGLANG: `dies` (says why, and ends), `never` (doesn't serve), `silent_echo` (no prompt ids
in replies), `no_rows` (no expert rows), `other_layout` (parameters that nobody knows).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from rl360.engines.sglang.checksum import checksums
from rl360.engines.tiny.engine import Engine, EngineOptions
from rl360.engines.tiny.server import application

FAULT = os.environ.get("FAKE_SGLANG", "")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module", required=True)
    names = "model-path served-model-name host device dtype random-seed weight-version base-gpu-id mem-fraction-static tp-size ep-size"
    for name in names.split():
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "context-length", "max-running-requests"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for flag in ("skip-server-warmup", "enable-return-routed-experts"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


async def serve(args: argparse.Namespace) -> None:
    options = EngineOptions(
        model=Path(args.model_path),
        generation="",
        slots=args.max_running_requests,
        context=args.context_length,
        dtype=args.dtype,
        seed=int(args.random_seed),
        version=args.weight_version,
        routed_experts=args.enable_return_routed_experts and FAULT != "no_rows",
    )
    engine = Engine(options)
    engine.start()
    app = application(engine)
    app.middlewares.append(named_sglang(engine))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    await engine.crashed


def every_layer(rows: str, engine: Engine) -> str:
    """Expert rows with a layer of nonsense for each dense layer."""
    shape = engine.updates.live.shape
    known = np.frombuffer(base64.b64decode(rows), "<i4").reshape(-1, len(shape.moe_layers), shape.topk)
    sent = np.full((len(known), shape.layers, shape.topk), -1, "<i4")
    sent[:, shape.moe_layers] = known
    return base64.b64encode(sent.tobytes()).decode()


def named_sglang(engine: Engine) -> Any:
    """The tiny engine's replies as SGLang 0.5.23 on a CPU would give them."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/weights_checker":
            weights = dict(engine.updates.live.named)
            if FAULT == "other_layout":
                weights["model.layers.0.self_attn.rotary.weight"] = weights["model.norm.weight"]
            return web.json_response(
                {"success": True, "ranks": [{"checksums": r} for r in checksums(weights, kind="fused_cpu", tp=1, ep=1)]}
            )
        response = await handler(request)
        if request.path == "/server_info":
            response.body = json.dumps({**json.loads(response.body), "version": "0.5.23"}).encode()
        if request.path == "/generate":
            body = json.loads(response.body)
            if FAULT == "silent_echo":
                body.pop("prompt_token_ids", None)
            if rows := body["meta_info"].get("routed_experts"):
                body["meta_info"]["routed_experts"] = every_layer(rows, engine)
            response.body = json.dumps(body).encode()
        return response

    return middleware


async def main() -> None:
    args = arguments()
    assert args.module == "sglang.launch_server", args.module
    if FAULT == "dies":
        sys.exit("torch.OutOfMemoryError: CUDA out of memory")
    if FAULT == "never":
        await asyncio.Event().wait()
    await serve(args)


if __name__ == "__main__":
    asyncio.run(main())
