"""`GET /metrics`: Prometheus text of one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rl360.engines.tiny.batching import Scheduler

_PREFIX = "rl360_engine_"


def render(scheduler: Scheduler, generation: str) -> str:
    """Counters and gauges, each labelled with the engine's generation. Read without a lock: single values, never torn."""
    lines: list[str] = []
    for name, kind, text, value in _samples(scheduler):
        lines += [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"]
        lines.append(f'{_PREFIX}{name}{{generation="{generation}"}} {value}')
    return "\n".join(lines) + "\n"


def _samples(s: Scheduler) -> Iterator[tuple[str, str, str, float]]:
    c = s.counters
    paused = 0.0 if s.paused_at is None else time.monotonic() - s.paused_at
    yield "running_requests", "gauge", "Requests that hold a slot.", len(s.running)
    yield "queued_requests", "gauge", "Requests that wait for a slot.", len(s.waiting)
    yield "weight_version", "gauge", "Policy version that samples now.", int(s.version)
    yield "kv_epoch", "gauge", "Swaps of weights so far; KV rows of another epoch are old.", s.epoch
    yield "kv_rows", "gauge", "KV rows held.", s.slots.rows
    yield "paused", "gauge", "1 while paused.", float(s.paused_at is not None)
    yield "paused_seconds_total", "counter", "Seconds paused.", c.paused_seconds + paused
    yield "forced_resumes_total", "counter", "Pauses that ran past their limit.", c.forced_resumes
    yield "requests_total", "counter", "Requests taken.", c.requests
    yield "aborted_requests_total", "counter", "Requests aborted.", c.aborted
    yield "retractions_total", "counter", "Times a running request went back to the queue.", c.retractions
    yield "prompt_tokens_total", "counter", "Prompt tokens of requests that ran.", c.prompt_tokens
    yield "cached_tokens_total", "counter", "Prompt tokens found in the cache.", c.cached_tokens
    yield "stale_cached_tokens_total", "counter", "Of those, tokens whose KV older weights wrote.", c.stale_cached_tokens
    yield "prefill_tokens_total", "counter", "Tokens prefilled.", c.prefill_tokens
    yield "decode_tokens_total", "counter", "Tokens decoded.", c.decode_tokens
    yield "steps_total", "counter", "Forwards.", c.steps
    yield "weight_updates_total", "counter", "Swaps of weights.", c.updates
