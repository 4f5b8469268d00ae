"""The trainer's own optimizer step: FLOP/s by its FLOP count, and the share of what the card's bf16 matrix product reaches in the same run.

    python bench/trainer.py [--shapes dense moe] [--tokens 8192 16384 32768] [--recompute none|full] [--peer] [--profile] [--json FILE]
    python bench/trainer.py --check        # the card's kernels in bf16 against plain ones in fp32: log-probs and gradient
    python bench/trainer.py --smoke        # tiny shapes on a CPU

A step is one microbatch through the same code that trains a run: packed sequences, PPO loss, gradient reduction, Adam. `--lengths` says how
long its sequences are: "one" fills a microbatch with one, "mixed" with sequences from 500 to 8,000 tokens. 30% of the tokens are sampled:
only these need logits. Expert choices are replayed. `share` is FLOP/s of forward and backward over the matrix product's; FLOPs are counted
in rl360/trainer/flops.py, recomputed ones not. The peer is transformers' model of the dense shape with the same tokens: bf16, torch's
attention, cross entropy over the same 30%, no optimizer.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rl360 import config
from rl360.bus import sample as wire
from rl360.sessions.routing import pack_rows
from rl360.trainer.batch import Microbatch, PackedBatch, Replay, TrainSample, pack, train_sample
from rl360.trainer.distributed import process_groups
from rl360.trainer.flops import step_flops
from rl360.trainer.policy import Policy
from rl360.trainer.spec import Experts, ModelSpec

SAMPLED = 0.3
WARMUP, TIMED = 3, 5

DENSE = ModelSpec(
    vocab=151_936, hidden=2048, layers=28, heads=16, groups=8, head_dim=128, ffn_hidden=6144, norm_eps=1e-6, rope_theta=1e6,
    context=40_960, tied=True,
)  # Qwen3-1.7B  # fmt: skip
MOE = ModelSpec(
    vocab=151_936, hidden=2048, layers=6, heads=32, groups=4, head_dim=128, ffn_hidden=6144, norm_eps=1e-6, rope_theta=1e6,
    context=40_960, tied=True,
    experts=Experts(count=128, topk=8, ffn_hidden=768, normalize_topk=True, layers=(True,) * 6),
)  # 6 of the 48 layers of Qwen3-30B-A3B: 4.0B parameters, what one card holds with gradients and Adam  # fmt: skip
SHAPES = {"dense": DENSE, "moe": MOE}


def small(spec: ModelSpec) -> ModelSpec:
    experts = spec.experts and replace(spec.experts, count=8, topk=2, ffn_hidden=32, layers=(False, True))
    return replace(spec, vocab=640, hidden=64, layers=2, heads=4, groups=2, head_dim=16, ffn_hidden=96, experts=experts)


@dataclass(frozen=True)
class Case:
    shape: str
    spec: ModelSpec
    tokens: int
    lengths: tuple[int, ...]
    kind: str

    @property
    def about(self) -> dict[str, object]:
        return {"shape": self.shape, "tokens": self.tokens, "lengths": self.kind, "sequences": len(self.lengths)}


def lengths_of(kind: str, tokens: int) -> tuple[int, ...]:
    """Sequences that fill a microbatch."""
    if kind == "one":
        return (tokens,)
    rng = np.random.default_rng(0)
    found: list[int] = []
    while (left := tokens - sum(found)) > 0:
        found.append(min(left, int(rng.integers(500, 8001))))
    return tuple(n for n in found if n > 1)


def batch_of(case: Case) -> PackedBatch:
    rng = np.random.default_rng(1)
    return pack(Microbatch(tuple(sample_of(case.spec, n, i, rng) for i, n in enumerate(case.lengths))), replay_of(case.spec))


def replay_of(spec: ModelSpec) -> Replay | None:
    return Replay(spec.experts.routing) if spec.experts else None


def sample_of(spec: ModelSpec, n: int, index: int, rng: np.random.Generator) -> TrainSample:
    mask = (rng.random(n) < SAMPLED).astype(np.uint8)
    mask[0], mask[-1] = 0, 1
    sample = wire.make(
        attempt=f"t0-g000-a{index}",
        branch=0,
        ids=rng.integers(0, spec.vocab, n).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -np.log(spec.vocab), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )
    routing = None
    if spec.experts:
        choices = rng.random((n - 1, sum(spec.experts.layers), spec.experts.count)).argpartition(spec.experts.topk, axis=2)
        routing = wire.encode(pack_rows(choices[..., : spec.experts.topk].astype(spec.experts.routing.dtype)))
    return train_sample(wire.encode(sample), advantage=float(rng.normal()), routing=routing)


def settings(args: argparse.Namespace, spec: ModelSpec) -> config.Trainer:
    return config.Trainer(
        dtype="float32" if args.smoke else "bfloat16", recompute=args.recompute, routing_replay=spec.experts is not None, lr=1e-6
    )


# ------------------------------------------------------------------------------------------------ measure


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_rate(size: int) -> float:
    """FLOP/s of a square product of random bf16 matrices: the mean of ten after three."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize()
    started = time.perf_counter()
    for _ in range(10):
        a @ b
    synchronize()
    return 10 * 2 * size**3 / (time.perf_counter() - started)


def measure(policy: Policy, case: Case, peak: float) -> dict[str, object]:
    batch = batch_of(case)
    rows = int(batch.mask.sum())
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    optimizer: list[float] = []
    for i in range(WARMUP + TIMED):
        synchronize()
        started = time.perf_counter()
        result = policy.step([batch], rows, version=0)
        synchronize()
        if i >= WARMUP:
            optimizer.append(result.seconds["optimizer"])
            times.append(time.perf_counter() - started - result.seconds["optimizer"])
    seconds = statistics.median(times)
    flops = step_flops(case.spec, case.lengths, rows)
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {
        **case.about,
        "logit_rows": rows,
        "forward_backward_s": seconds,
        "optimizer_s": statistics.median(optimizer),
        "tokens_per_s": case.tokens / (seconds + statistics.median(optimizer)),
        "tflops": flops / seconds / 1e12,
        "share": flops / seconds / peak,
        "peak_gib": memory,
        "grad_norm": result.grad_norm,
    }


def profile(policy: Policy, case: Case) -> str:
    """Where a step's time on the card goes."""
    batch = batch_of(case)
    with torch.profiler.profile() as found:
        policy.step([batch], int(batch.mask.sum()), version=0)
        synchronize()
    return found.key_averages().table(sort_by="self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total", row_limit=45)


# ------------------------------------------------------------------------------------------------ check


def check(shape: str, kind: str, recompute: Literal["none", "full"]) -> dict[str, object]:
    """The same weights and the same microbatch in bf16 and in fp32: mean and maximum |Δ log p|, cosine and norm of the gradients."""
    base = replace(SHAPES[shape], vocab=4096, hidden=512, layers=4, heads=8, groups=4, ffn_hidden=1024)
    spec = replace(base, experts=base.experts and replace(base.experts, count=16, topk=4, ffn_hidden=256, layers=(False, True, True, True)))
    case = Case(shape, spec, 8192, (8192,) if kind == "one" else (700, 1300, 511, 2000, 1024, 657, 2000), kind)
    batch, found, weights = batch_of(case), [], {}
    for dtype in ("float32", "bfloat16"):
        policy = Policy(spec, config.Trainer(dtype=dtype, recompute=recompute, routing_replay=spec.experts is not None), 1.0)
        with torch.no_grad():
            for name, parameter in policy.parameters():
                parameter.copy_(weights.setdefault(name, parameter.detach().bfloat16()))
        (logprobs,) = policy.logprobs([batch])
        found.append((logprobs.cpu(), policy.gradient([batch], float(batch.mask.sum()), version=0)))
        del policy
        clean()
    (plain, gradient), (fused, other) = found
    gap = (plain - fused)[batch.mask].abs()
    cosine = torch.nn.functional.cosine_similarity(gradient.double(), other.double(), dim=0)
    result = {**case.about, "recompute": recompute, "dlogp_mean": gap.mean().item(), "dlogp_max": gap.max().item()}
    return result | {"gradient_cosine": cosine.item(), "gradient_norms": [gradient.norm().item(), other.norm().item()]}


# ------------------------------------------------------------------------------------------------ peer


def peer(case: Case, peak: float) -> dict[str, object]:
    """transformers' Qwen3 with the same sequences, one after another."""
    import transformers

    s = case.spec
    shape = transformers.Qwen3Config(
        vocab_size=s.vocab, hidden_size=s.hidden, num_hidden_layers=s.layers, num_attention_heads=s.heads, num_key_value_heads=s.groups,
        head_dim=s.head_dim, intermediate_size=s.ffn_hidden, max_position_embeddings=s.context, tie_word_embeddings=s.tied,
    )  # fmt: skip
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa").to(device)
    batch = batch_of(case).to(device)

    def step() -> None:
        model.zero_grad()
        for ids, targets, mask in zip(*(x.split(list(case.lengths)) for x in (batch.ids, batch.targets, batch.mask)), strict=True):
            hidden = model.model(ids[None]).last_hidden_state[0]
            torch.nn.functional.cross_entropy(model.lm_head(hidden[mask]).float(), targets[mask]).backward()

    seconds = timed(step)
    flops = step_flops(s, case.lengths, int(batch.mask.sum()))
    return {
        **case.about,
        "peer": "transformers",
        "forward_backward_s": seconds,
        "tflops": flops / seconds / 1e12,
        "share": flops / seconds / peak,
    }


def timed(step: Callable[[], None]) -> float:
    times: list[float] = []
    for i in range(WARMUP + TIMED):
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        if i >= WARMUP:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


# ------------------------------------------------------------------------------------------------ the whole


def cases(args: argparse.Namespace, shape: str, spec: ModelSpec) -> Iterator[Case]:
    for tokens in args.tokens:
        for kind in args.lengths:
            lengths = lengths_of(kind, tokens)
            yield Case(shape, spec, sum(lengths), lengths, kind)


def run(args: argparse.Namespace) -> dict[str, object]:
    peak = matmul_rate(256 if args.smoke else 8192)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{name}, torch {torch.__version__}: matrix product {peak / 1e12:.4g} TFLOP/s", flush=True)
    found: list[dict[str, object]] = []
    with process_groups():
        if args.check:
            checks = [check(shape, kind, again) for shape in args.shapes for kind in args.lengths for again in ("none", "full")]
            print(*checks, sep="\n", flush=True)
            return {"device": name, "torch": torch.__version__, "checks": checks}
        for shape in args.shapes:
            spec = small(SHAPES[shape]) if args.smoke else SHAPES[shape]
            policy = Policy(spec, settings(args, spec), 1.0)
            for case in cases(args, shape, spec):
                found.append(measure(policy, case, peak))
                print(row(found[-1]), flush=True)
            if args.profile:
                print(profile(policy, case), flush=True)
            del policy
            clean()
            if args.peer and spec.experts is None:
                for case in cases(args, shape, spec):
                    found.append(peer(case, peak))
                    print(row(found[-1]), flush=True)
                    clean()
    return {"device": name, "torch": torch.__version__, "recompute": args.recompute, "matmul_tflops": peak / 1e12, "cases": found}


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def row(r: dict[str, object]) -> str:
    what = f"{r.get('peer', 'rl360'):12} {r['shape']:5} {r['tokens']:>6} tokens {r['lengths']:5}"
    text = f"{what} {r['forward_backward_s']:8.3f} s {r['tflops']:9.4g} TFLOP/s {r['share']:6.1%}"
    if "peak_gib" in r:
        text += f"   optimizer {r['optimizer_s']:.3f} s, {r['tokens_per_s']:.0f} tokens/s, peak {r['peak_gib']:.1f} GiB"
    return text


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 32768])
    parser.add_argument("--lengths", nargs="+", choices=("one", "mixed"), default=["mixed", "one"])
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.smoke:
        args.tokens = [1024]
    result = run(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
