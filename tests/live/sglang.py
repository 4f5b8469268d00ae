"""The contract's cases and weight pushes against a running SGLang. Starts and stages nothing.

    python -m tests.live.sglang http://127.0.0.1:30000 MODEL_FOLDER [--dtype bfloat16]

MODEL_FOLDER is what the server was started with (Qwen3 or Qwen3-MoE, in Hugging Face layout). Prints one JSON object; exit status 1
when anything in it failed. When this process and the server share a GPU, NCCL must take them for two hosts: set NCCL_HOSTID here.
The server holds its own weights again at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
import numpy as np
import torch
from torch import Tensor

from rl360.config import parse
from rl360.engines import contract as c
from rl360.engines.client import EngineClient
from rl360.engines.probe import Probe
from rl360.engines.push import Pusher
from rl360.engines.push_outcome import PushOutcome
from rl360.engines.sglang.checkpoint import Checkpoint
from rl360.sessions.routing import RoutingShape, decode, place, shape_of
from tests.engines.contract_cases import RECORDED_PROMPT, Subject, cases_for

BUCKET: Final = 64_000_000  # bytes
PUSHES: Final = 4  # a path: the first one makes the group
CONVERSATIONS: Final = 16
TURNS: Final = 6
NAME: Final = "live"


class Live:
    """One server, and what happens to it."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: Path, dtype: str) -> None:
        self.client = EngineClient(http, url, NAME, timeout=120)
        self.model, self.dtype = model, dtype
        self.config: dict[str, Any] = json.loads((model / "config.json").read_text())
        self.report: dict[str, Any] = {}
        self.failed: list[str] = []

    async def run(self) -> dict[str, Any]:
        info = await self.client.server_info()
        dialect = await self.client.dialect()
        rows = info.enable_return_routed_experts
        shape = shape_of(self.config, every_layer=True) if rows else None
        prompt = [i % self.config["vocab_size"] for i in RECORDED_PROMPT]
        subject = Subject(self.client, dialect, prompt, rows=shape.sent * shape.topk if shape else 0)
        self.report |= {"server": dialect.server, "device": info.device, "tp": info.tp_size, "expert_rows": rows, "cases": {}}
        for name, case in cases_for(dialect, rows=rows).items():
            await self.step(name, lambda case=case: case(subject), self.report["cases"])
        await self.step("probe", lambda: self.probe(rows), self.report)
        if shape is not None:
            await self.step("overlap_cached", lambda: self.overlap(shape, flush=False), self.report)
            await self.step("overlap_computed_again", lambda: self.overlap(shape, flush=True), self.report)
        for shared in [False, *([True] if dialect.shared_memory else [])]:
            path = "shared_memory" if shared else "broadcast"
            await self.step(f"push_{path}", lambda shared=shared: self.pushes(prompt, shared), self.report)
        return {**self.report, "failed": self.failed}

    async def step(self, name: str, act: Callable[[], Awaitable[Any]], into: dict[str, Any]) -> None:
        started = time.perf_counter()
        try:
            found = await act()
            into[name] = {"ok": True, "seconds": round(time.perf_counter() - started, 4), **({"found": found} if found else {})}
        except Exception as e:  # noqa: BLE001  (the report is the point: the next step runs all the same)
            self.failed.append(name)
            into[name] = {"ok": False, "error": repr(e)[:2000], "where": traceback.format_exc().splitlines()[-4:]}

    async def probe(self, rows: bool) -> str:
        engine = {"kind": "sglang", "dtype": self.dtype, "routed_experts": rows}
        config = parse({"policy": {"path": str(self.model)}, "engine": engine, "sampling": {"context": 512}})
        label = (await self.client.model_info()).weight_version
        await self.client.label("0")
        try:
            return (await Probe(self.client, config, "0").prove()).server
        finally:
            await self.client.label(label)

    async def overlap(self, shape: RoutingShape, *, flush: bool) -> dict[str, Any]:
        """How often a token's experts are told otherwise with the next turn: all rows are asked for again.

        That turn finds the tokens in the cache, or, after a flush, computes them again. Several conversations at once, so that
        forwards have other company each time.
        """
        talks = [_Talk(self.client, shape, random.Random(seed), int(self.config["vocab_size"])) for seed in range(CONVERSATIONS)]
        for _ in range(TURNS):
            await asyncio.gather(*(talk.turn() for talk in talks))
            if flush:
                await self.client.flush()
        return {name: sum(getattr(talk, name) for talk in talks) for name in ("rows", "mismatch", "cached_tokens")}

    async def pushes(self, prompt: list[int], shared: bool) -> list[dict[str, Any]]:
        """Weights that move and come back, with a request under way each time."""
        held = dict(Checkpoint(self.model, getattr(torch, self.dtype)))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        held = {name: t.to(device) for name, t in held.items()}
        moved = {name: t * 1.125 if t.ndim > 1 else t for name, t in held.items()}
        told: list[dict[str, Any]] = []
        async with Pusher(bucket_bytes=BUCKET, timeout=300, call_timeout=120, shared_memory=shared) as pusher:
            for version in range(1, PUSHES + 1):
                outcome, under_way = await self.push(pusher, version, moved if version % 2 else held, prompt)
                told.append(_told(outcome, under_way))
                assert all(r.ok for r in outcome.results), told[-1]
                assert (await self.sample(prompt, 4)).meta_info.weight_version == str(version)
        return told

    async def push(
        self, pusher: Pusher, version: int, weights: Mapping[str, Tensor], prompt: list[int]
    ) -> tuple[PushOutcome, c.GenerateReply]:
        under_way = asyncio.ensure_future(self.sample(prompt, 300, rid=f"under-way-{version}."))
        await asyncio.sleep(0.5)
        outcome = await pusher.push(version, weights, {NAME: self.client.url})
        return outcome, await under_way

    async def sample(self, prompt: list[int], tokens: int, rid: str = "") -> c.GenerateReply:
        params = c.SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
        return await self.client.generate(c.GenerateRequest(input_ids=prompt, sampling_params=params, rid=rid, return_logprob=True))


class _Talk:
    """One conversation, and how the experts of its tokens compare from turn to turn."""

    def __init__(self, client: EngineClient, shape: RoutingShape, rng: random.Random, vocab: int) -> None:
        self._client, self._shape, self._rng, self._vocab = client, shape, rng, vocab
        self._ids, self._held = self._words(40), np.empty((0, shape.layers, shape.topk), np.uint8)
        self.rows = self.mismatch = self.cached_tokens = 0

    def _words(self, count: int) -> list[int]:
        return [self._rng.randrange(3, self._vocab) for _ in range(count)]

    async def turn(self) -> None:
        params = c.SamplingParams(temperature=1, max_new_tokens=24, ignore_eos=True)
        reply = await self._client.generate(c.GenerateRequest(input_ids=self._ids, sampling_params=params, return_routed_experts=True))
        rows, before = decode(reply.meta_info.routed_experts or "", self._shape), self._held
        self._ids += reply.output_ids
        delta = place(rows, tokens=len(self._ids), held=len(before), stored=lambda a, b: before[a:b])
        self.rows, self.mismatch = self.rows + delta.overlap_rows, self.mismatch + delta.overlap_mismatch
        self.cached_tokens += reply.meta_info.cached_tokens
        self._held = rows
        self._ids += self._words(16)


def _told(outcome: PushOutcome, under_way: c.GenerateReply) -> dict[str, Any]:
    meta = under_way.meta_info
    return {
        "version": outcome.version,
        "ok": [r.ok for r in outcome.results],
        "error": [r.error for r in outcome.results if r.error],
        "calls": outcome.results[0].calls,
        "bytes": outcome.results[0].bytes,
        "pause_seconds": round(outcome.pause_seconds, 4),
        "seconds": round(outcome.seconds, 4),
        "under_way": {
            "finish": meta.finish_reason.type,
            "tokens": meta.completion_tokens,
            "versions": [(s.version, s.start, s.end) for s in meta.weight_versions] or meta.weight_version,
            "retractions": meta.num_retractions,
        },
    }


async def drive(url: str, model: Path, dtype: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http:
        return await Live(http, url, model, dtype).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    report = asyncio.run(drive(args.url, args.model, args.dtype))
    print(json.dumps(report, indent=1))
    return 1 if cast(list[str], report["failed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
