"""`python -m rl360.engines.tiny --model DIR --port N`: one engine by itself, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from rl360.engines.tiny.engine import Engine, EngineOptions
from rl360.engines.tiny.server import serve
from rl360.engines.tiny.shape import ModelError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rl360.engines.tiny", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder in Hugging Face layout")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed")
    parser.add_argument("--context", type=int, default=0, help="tokens of a whole conversation; 0: as many as the model knows")
    parser.add_argument("--slots", type=int, default=64, help="conversations whose KV is kept")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a collective call, and of a pause that nobody ends")
    parser.add_argument("--ep", type=int, default=1, help="ranks in a push, which share out the experts")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    options = EngineOptions(
        model=args.model,
        generation="standalone",
        context=args.context,
        slots=args.slots,
        dtype=args.dtype,
        seed=args.seed,
        timeout=args.timeout,
        ep=args.ep,
        routed_experts=args.enable_return_routed_experts,
    )
    try:
        asyncio.run(_serve(options, args.host, args.port))
    except (ModelError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


async def _serve(options: EngineOptions, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = Engine(options)
    engine.start()
    runner, port = await serve(engine, host, port)
    print(f"tiny engine listening on http://{host}:{port}", flush=True)
    waiting = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({waiting, engine.crashed}, return_when=asyncio.FIRST_COMPLETED)
        if engine.crashed.done():
            engine.crashed.result()
    finally:
        waiting.cancel()
        await runner.cleanup()
        engine.stop()


if __name__ == "__main__":
    sys.exit(main())
