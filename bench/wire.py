"""One merged 58K-token sample on the wire: this project's bytes beside JSON with base64 int32.

    python bench/wire.py [--json] [--tokens N] [--layers N] [--topk N]

Encode: from the sample as its owner holds it (here packed arrays; there lists of numbers and raw int32 routing) to bytes.
Decode: from bytes to arrays that a trainer can index. Both sides carry ids, mask, log-probs, versions and one expert row a token but
the last. Medians; the ratios are JSON's seconds over ours, measured in this run.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rl360.bus import sample

EXPERTS = 128


@dataclass(frozen=True)
class Arrays:
    ids: np.ndarray[Any, np.dtype[np.int32]]
    mask: np.ndarray[Any, np.dtype[np.uint8]]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    versions: np.ndarray[Any, np.dtype[np.int32]]
    rows: np.ndarray[Any, np.dtype[np.uint8]]


def draw(tokens: int, layers: int, topk: int) -> Arrays:
    """A sample whose every third token or so was sampled."""
    rng = np.random.default_rng(0)
    mask = (rng.random(tokens) < 0.3).astype(np.uint8)
    return Arrays(
        ids=rng.integers(0, 150_000, tokens).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.random(tokens), 0).astype(np.float32),
        versions=np.where(mask, 7, -1).astype(np.int32),
        rows=rng.integers(0, EXPERTS, (tokens - 1, layers, topk)).astype(np.uint8),
    )


class Ours:
    """msgpack of raw arrays, one byte an expert id, encoded into buffers that are used again, as the merger does."""

    def __init__(self, a: Arrays) -> None:
        n, layers, topk = a.rows.shape
        self.sample = sample.make(attempt="t0-g000-a0", branch=0, ids=a.ids, mask=a.mask, logprobs=a.logprobs, versions=a.versions)
        self.routing = sample.Routing(rows=n, layers=layers, topk=topk, dtype="uint8", data=a.rows.tobytes())
        self.buffers = (bytearray(), bytearray())
        self.encode()

    def encode(self) -> None:
        sample.encode_into(self.sample, self.buffers[0])
        sample.encode_into(self.routing, self.buffers[1])

    def decode(self) -> Arrays:
        s, r = sample.decode(self.buffers[0]), sample.decode_routing(self.buffers[1])
        return Arrays(ids=s.ids, mask=s.mask, logprobs=s.logprobs, versions=s.versions, rows=r.array)  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        return sum(map(len, self.buffers))


class Json:
    """The notes' shape: lists of numbers and base64 of int32 in one JSON object."""

    def __init__(self, a: Arrays, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any]) -> None:
        self.dumps, self.loads, self.shape = dumps, loads, a.rows.shape
        self.lists = {
            "tokens": a.ids.tolist(),
            "loss_mask": a.mask.tolist(),
            "rollout_log_probs": a.logprobs.tolist(),
            "versions": a.versions.tolist(),
        }
        self.raw = a.rows.astype("<i4").tobytes()
        self.encode()

    def encode(self) -> None:
        self.data = self.dumps({**self.lists, "routed_experts": base64.b64encode(self.raw).decode()})

    def decode(self) -> Arrays:
        d = self.loads(self.data)
        rows = np.frombuffer(base64.b64decode(d["routed_experts"]), "<i4").reshape(self.shape)
        return Arrays(
            ids=np.array(d["tokens"], np.int32),
            mask=np.array(d["loss_mask"], np.uint8),
            logprobs=np.array(d["rollout_log_probs"], np.float32),
            versions=np.array(d["versions"], np.int32),
            rows=rows,  # type: ignore[arg-type]
        )

    @property
    def size(self) -> int:
        return len(self.data)


def seconds(work: Callable[[], object], runs: int) -> float:
    """Median of `runs`, after one that warms up."""
    work()
    times: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def check(side: Ours | Json, a: Arrays) -> None:
    b = side.decode()
    for name in ("ids", "mask", "logprobs", "versions", "rows"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the ratios as a last line of JSON")
    parser.add_argument("--tokens", type=int, default=58_000)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--topk", type=int, default=8)
    args = parser.parse_args()
    a = draw(args.tokens, args.layers, args.topk)
    sides: dict[str, Ours | Json] = {
        "rl360": Ours(a),
        "json": Json(a, lambda d: json.dumps(d).encode(), json.loads),
        "orjson": Json(a, orjson.dumps, orjson.loads),
    }
    took: dict[str, tuple[float, float]] = {}
    print(f"one sample: {args.tokens:,} tokens, {args.layers} layers x {args.topk} experts")
    print(f"{'':8}{'MB':>9}{'encode ms':>12}{'decode ms':>12}")
    for name, side in sides.items():
        check(side, a)
        runs = 15 if name == "rl360" else 3
        took[name] = (seconds(side.encode, runs), seconds(side.decode, runs))
        print(f"{name:8}{side.size / 1e6:9.1f}{took[name][0] * 1e3:12.2f}{took[name][1] * 1e3:12.2f}")
    ours = took["rl360"]
    ratios = {f"{op}_vs_{name}": took[name][i] / ours[i] for name in ("json", "orjson") for i, op in enumerate(("encode", "decode"))}
    for name, ratio in ratios.items():
        print(f"{name:18}{ratio:8.0f}x")
    if args.json:
        print(json.dumps({k: round(v, 2) for k, v in ratios.items()}))


if __name__ == "__main__":
    main()
