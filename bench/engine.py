"""Decode rate of the tiny engine beside transformers' generate, and with its HTTP server, on the starting policy.

    python bench/engine.py [--json] [--tokens N] [--model DIR]

Rates are tokens a CPU-second of the process that samples, one torch thread, fp32. Each pair is measured A B A B and the best
of each is taken: other work on the machine only ever makes a run slower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from rl360.engines.tiny.batching import Scheduler
from rl360.engines.tiny.model import Model
from rl360.engines.tiny.requests import Request
from rl360.engines.tiny.shape import read_shape
from rl360.engines.tiny.weights import load_weights

BATCHES = (1, 8, 32, 64)
PROMPT = 80
ROUNDS = 3
CLIENTS, REPLY = 48, 24
FIRST_PLAIN_ID = 5


class Ours:
    """The scheduler without its thread: what sampling itself costs."""

    def __init__(self, folder: Path) -> None:
        shape = read_shape(folder)
        self._vocab = shape.vocab
        self._model = Model(load_weights(folder, shape, torch.float32), slots=max(BATCHES), context=512)

    def rate(self, batch: int, tokens: int) -> float:
        scheduler = Scheduler(self._model, version="0", seed=0, on_finish=lambda _: None)
        for i, ids in enumerate(prompts(batch, self._vocab)):
            request = Request(rid=f"{i}.", ids=ids, prompt=PROMPT, max_new=tokens + 1, stop=frozenset(), temperature=1.0)
            scheduler.submit(request)
        while scheduler.waiting:
            scheduler.step()
        start = time.process_time()
        while scheduler.running:
            scheduler.step()
        return scheduler.counters.decode_tokens / (time.process_time() - start)


class Theirs:
    """transformers' generate with its KV cache; the time of the prefill is taken off."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def rate(self, batch: int, tokens: int) -> float:
        ids = torch.tensor(prompts(batch, self._model.config.vocab_size))
        return batch * tokens / (self._seconds(ids, tokens + 1) - self._seconds(ids, 1))

    def _seconds(self, ids: torch.Tensor, tokens: int) -> float:
        start = time.process_time()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
        return time.process_time() - start


def prompts(batch: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(FIRST_PLAIN_ID, vocab, (batch, PROMPT), generator=generator).tolist()


def over_http(folder: Path, requests: int) -> float:
    """Sampled tokens a CPU-second of a whole engine process: HTTP, JSON and prefill included."""
    command = [sys.executable, "-m", "rl360.engines.tiny", "--model", str(folder), "--context", "512"]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        url = engine.stdout.readline().split()[-1]
        vocab = read_shape(folder).vocab
        asyncio.run(_drive(url, CLIENTS, vocab))  # warm
        start = _cpu_seconds(engine.pid)
        asyncio.run(_drive(url, requests, vocab))
        return requests * REPLY / (_cpu_seconds(engine.pid) - start)
    finally:
        engine.terminate()
        engine.wait(10)


async def _drive(url: str, requests: int, vocab: int) -> None:
    room = asyncio.Semaphore(CLIENTS)
    params = {"max_new_tokens": REPLY, "ignore_eos": True}
    async with aiohttp.ClientSession() as http:

        async def one(ids: list[int]) -> None:
            body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "return_prompt_token_ids": True}
            async with room, http.post(f"{url}/generate", json=body) as reply:
                assert len((await reply.json())["output_ids"]) == REPLY

        await asyncio.gather(*(one(ids) for ids in prompts(requests, vocab)))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    parser.add_argument("--tokens", type=int, default=96, help="tokens decoded for each sequence")
    parser.add_argument("--model", type=Path, default=Path(str(resources.files("rl360.tiny") / "policy")))
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = Ours(args.model), Theirs(args.model)
    result: dict[str, float] = {}
    print(f"{'batch':>6} {'tiny engine':>12} {'transformers':>13} {'ratio':>7}   (tokens a CPU-second)")
    for batch in BATCHES:
        a = b = 0.0
        for _ in range(ROUNDS):
            a, b = max(a, ours.rate(batch, args.tokens)), max(b, theirs.rate(batch, args.tokens // 4))
        print(f"{batch:>6} {a:>12,.0f} {b:>13,.0f} {a / b:>7.1f}", flush=True)
        result |= {f"tokens_b{batch}": round(a), f"vs_transformers_b{batch}": round(a / b, 2)}
    http = over_http(args.model, 4 * CLIENTS)
    print(f"over HTTP, {CLIENTS} clients, {PROMPT} + {REPLY} tokens, prefill included: {http:,.0f}")
    result["tokens_http"] = round(http)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
