"""Trace ids that follow from names, so that a trajectory's trace can be rebuilt from the journal alone.

trace id = blake3(run, attempt), span id = blake3(run, attempt, span name); W3C `traceparent` in every NATS header and HTTP hop.
"""

from __future__ import annotations

import blake3

from rl360.bus import events as ev


def trace_id(run: str, attempt: str) -> str:
    """32 hex characters: the trace of one attempt."""
    return blake3.blake3(f"trace/{run}/{attempt}".encode()).hexdigest(16)


def span_id(run: str, attempt: str, span: str) -> str:
    """16 hex characters: one span of an attempt's trace ("attempt", "phase/agent", "turn/3", …)."""
    return blake3.blake3(f"span/{run}/{attempt}/{span}".encode()).hexdigest(8)


def traceparent(run: str, attempt: str, span: str) -> str:
    """W3C trace context with `span` as the parent."""
    return f"00-{trace_id(run, attempt)}-{span_id(run, attempt, span)}-01"


def traceparent_of(event: ev.Event) -> str:
    """Context of an event: its attempt's trace when it has an attempt, else its step's."""
    attempt = getattr(event, "attempt", None)
    name = attempt if isinstance(attempt, str) else f"step-{event.step}"
    return traceparent(event.run, name, "attempt")
