"""Expert rows of one long attempt, from the engines' replies to a batch on the trainer: deltas beside the whole conversation each turn.

    python bench/routing.py [--json] [--turns 61] [--tokens 58000] [--layers 61] [--topk 8] [--attempts 8]

The attempt grows evenly, so that its prompts add up to 2.6M tokens. What is compared:
    wire     bytes of rows in the engines' replies (SGLang's base64 of int32) and in the merged sample
    cpu      of one attempt: every reply parsed, its new rows kept, merged, encoded, decoded and checked by the trainer.
             The peers parse the whole conversation's rows with every reply and carry the merged sample as JSON with base64 int32
    ready    seconds in which one trainer rank makes packed tensors of `--attempts` merged samples. The journal has them merged by then,
             but for the last one; ranks share a step's samples, and prepare a batch while the one before trains
CPU and wall times are of this machine; the ratios are of one run.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from rl360.bus import sample
from rl360.bus.blobs import BlobStore
from rl360.bus.events import RoutingDelta
from rl360.bus.payload import Payload
from rl360.sessions import routing
from rl360.trainer.batch import Microbatch, Replay, TrainSample, pack, train_sample

EXPERTS = 128
OUTPUT = 0.3  # share of a turn's new tokens that the policy samples


@dataclass(frozen=True)
class Attempt:
    """`ends[i]`: tokens of the conversation after turn i + 1; `prompts[i]`: of its prompt. rows [tokens - 1, layers, topk] int32."""

    ends: list[int]
    prompts: list[int]
    rows: np.ndarray[Any, np.dtype[np.int32]]


def draw(turns: int, tokens: int, layers: int, topk: int, prompt_tokens: int) -> Attempt:
    """A conversation whose prompts add up to about `prompt_tokens`."""
    first = max(2 * prompt_tokens / turns - tokens, tokens / turns)
    prompts = [int(n) for n in np.linspace(first, tokens - (tokens - first) / turns * OUTPUT, turns)]
    ends = [*(p + int((q - p) * OUTPUT) for p, q in itertools.pairwise(prompts)), tokens]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, EXPERTS, (tokens - 1, layers, topk), dtype=np.int32)
    rows.sort(axis=2)
    rows += np.arange(topk, dtype=np.int32)  # no expert twice
    return Attempt(ends, prompts, rows)


class Reply(msgspec.Struct):
    routed_experts: str


_REPLY = msgspec.json.Decoder(Reply)


def reply(rows: np.ndarray[Any, Any]) -> bytes:
    return b'{"routed_experts":"' + base64.b64encode(np.ascontiguousarray(rows, "<i4")) + b'"}'


def ours(attempt: Attempt, shape: routing.RoutingShape, tokens: TrainSample) -> tuple[float, int, int]:
    """Deltas: CPU seconds, bytes of replies, bytes of the merged rows."""
    deltas: list[RoutingDelta] = []
    held = size = 0
    spent = 0.0
    for turn, end in enumerate(attempt.ends):
        given = reply(attempt.rows[held : end - 1])
        size += len(given)
        start = time.process_time()
        deltas.append(delta_of(given, turn, tokens=end, held=held, shape=shape))
        held = end - 1
        spent += time.process_time() - start
    start = time.process_time()
    rows = routing.stitch(deltas, lambda payload: payload.inline or b"")
    assert rows is not None
    data = sample.encode(routing.pack_rows(rows))
    trained = TrainSample(tokens.sample, tokens.digest, tokens.advantage, sample.decode_routing(data))
    packed = pack(Microbatch((trained,)), Replay(shape)).experts
    spent += time.process_time() - start
    assert packed is not None
    assert np.array_equal(packed[:-1].numpy(), attempt.rows)
    return spent, size, len(data)


def delta_of(given: bytes, turn: int, *, tokens: int, held: int, shape: routing.RoutingShape) -> RoutingDelta:
    """What the session server makes of one reply."""
    rows = routing.decode(_REPLY.decode(given).routed_experts, shape)
    delta = routing.place(rows, tokens=tokens, held=held, stored=lambda a, b: rows[a:b])
    data = delta.rows.tobytes()
    return RoutingDelta(
        run="bench",
        step=0,
        attempt="t0-g000-a0",
        group=0,
        session="t0-g000-a0.1",
        turn=turn + 1,
        first=delta.first,
        rows=len(delta.rows),
        layers=shape.layers,
        topk=shape.topk,
        dtype=shape.dtype,
        data=Payload(size=len(data), inline=data),
    )


def peer(attempt: Attempt, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any]) -> tuple[float, int, int]:
    """The same with the whole conversation's rows in every reply, and JSON."""
    spent, size, rows = 0.0, 0, attempt.rows[:0]
    for end in attempt.ends:
        given = reply(attempt.rows[: end - 1])
        size += len(given)
        start = time.process_time()
        rows = np.frombuffer(base64.b64decode(loads(given)["routed_experts"]), "<i4").reshape(-1, *attempt.rows.shape[1:])
        spent += time.process_time() - start
    start = time.process_time()
    merged = dumps({"routed_experts": base64.b64encode(rows).decode()})
    np.frombuffer(base64.b64decode(loads(merged)["routed_experts"]), "<i4").reshape(rows.shape)
    return spent + time.process_time() - start, size, len(merged)


def seconds_to_ready(attempts: int, tokens: bytes, rows: bytes, shape: routing.RoutingShape) -> float:
    """Wall seconds in which one rank reads and packs `attempts` merged samples from the blob store."""
    with tempfile.TemporaryDirectory() as folder:
        blobs = BlobStore(Path(folder))
        held = [(blobs.pack(tokens), blobs.pack(rows)) for _ in range(attempts)]
        start = time.perf_counter()
        for token_blob, row_blob in held:
            one = train_sample(blobs.unpack(token_blob), advantage=1.0, routing=blobs.unpack(row_blob))
            pack(Microbatch((one,)), Replay(shape))
        return time.perf_counter() - start


def sampled(tokens: int) -> bytes:
    """A sample of so many tokens, encoded."""
    mask = np.zeros(tokens, np.uint8)
    mask[1::3] = 1
    return sample.encode(
        sample.make(
            attempt="t0-g000-a0",
            branch=0,
            ids=np.arange(tokens, dtype=np.int32) % 1000,
            mask=mask,
            logprobs=np.where(mask, -0.5, 0).astype(np.float32),
            versions=np.where(mask, 7, -1).astype(np.int32),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the ratios as a last line of JSON")
    parser.add_argument("--turns", type=int, default=61)
    parser.add_argument("--tokens", type=int, default=58_000)
    parser.add_argument("--prompt-tokens", type=int, default=2_600_000)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--attempts", type=int, default=8)
    args = parser.parse_args()
    attempt = draw(args.turns, args.tokens, args.layers, args.topk, args.prompt_tokens)
    shape = routing.RoutingShape(layers=args.layers, topk=args.topk, experts=EXPERTS + args.topk)
    data = sampled(args.tokens)
    tokens = train_sample(data, advantage=1.0)
    sides = {
        "rl360": ours(attempt, shape, tokens),
        "json": peer(attempt, lambda d: json.dumps(d).encode(), json.loads),
        "orjson": peer(attempt, orjson.dumps, orjson.loads),
    }
    print(f"{args.tokens:,} tokens, {args.turns} turns, {sum(attempt.prompts):,} prompt tokens, {args.layers} layers x {args.topk}")
    print(f"{'':8}{'replies MB':>12}{'merged MB':>11}{'CPU s':>8}")
    for name, (cpu, replies, merged) in sides.items():
        print(f"{name:8}{replies / 1e6:12,.1f}{merged / 1e6:11,.1f}{cpu:8.2f}")
    rows = sample.encode(routing.pack_rows(attempt.rows.astype(np.uint8)))
    total = seconds_to_ready(args.attempts, data, rows, shape)
    print(f"blob store to packed tensors, one rank: {args.attempts} samples in {total:.2f} s, {total / args.attempts * 1e3:.0f} ms each")
    cpu, replies, merged = sides["rl360"]
    ratios = {
        "full_vs_merged_bytes": sides["json"][1] / merged,
        "full_vs_delta_replies": sides["json"][1] / replies,
        **{f"cpu_vs_{name}": sides[name][0] / cpu for name in ("json", "orjson")},
    }
    for name, ratio in ratios.items():
        print(f"{name:24}{ratio:8.1f}x")
    if args.json:
        print(json.dumps({k: round(v, 2) for k, v in ratios.items()} | {"seconds_to_ready": round(total, 3)}))


if __name__ == "__main__":
    main()
