"""OTLP export of a run's attempts, from the journal, by the supervisor.

The spans are those of `rl360 trace` (pure, deterministic ids), sent by the OpenTelemetry SDK's exporter when
`telemetry.otlp_endpoint` is set. A collector that is slow or away is counted and logged, and never stops training.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.launch.trace import Span, spans_of
from rl360.trainer.metrics import belongs

log = logging.getLogger(__name__)

_RESOURCE: Final = Resource.create({"service.name": "rl360"})
_SCOPE: Final = InstrumentationScope("rl360.journal")


def exporter(endpoint: str) -> SpanExporter:
    """The SDK's OTLP exporter for `http://host:4318`."""
    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)


class Telemetry:
    """Keeps the events of open steps and evaluations; exports the attempts of each when it closes; later ones are the journal's alone."""

    def __init__(self, target: SpanExporter) -> None:
        self._target = target
        self._records: dict[tuple[ev.Purpose, int], list[Recorded]] = defaultdict(list)
        self._closed: set[tuple[ev.Purpose, int]] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self.failed = 0
        self.sent = 0

    def on(self, recorded: Recorded) -> None:
        """Fold one event; exporting happens in a thread."""
        event = recorded.event
        key = belongs(event), event.step
        if event.step < 0 or key in self._closed:
            return
        self._records[key].append(recorded)
        if isinstance(event, ev.StepClosed):
            self._closed.add(key)
            task = asyncio.get_running_loop().create_task(self._send(self._records.pop(key)))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def close(self, seconds: float = 5.0) -> None:
        """Wait for exports under way, at most `seconds`."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=seconds)

    async def _send(self, records: list[Recorded]) -> None:
        spans = [_readable(s) for s in _all_spans(records)]
        try:
            result = await asyncio.to_thread(self._target.export, spans)
            why = "" if result is SpanExportResult.SUCCESS else "the collector did not take them"
        except OSError as e:  # older exporters raise what `requests` raises; none of it may stop training
            why = f"{type(e).__name__}: {e}"
        if not why:
            self.sent += len(spans)
            return
        self.failed += len(spans)
        log.warning("%d spans could not be exported (%s); training goes on", len(spans), why)


def _all_spans(records: list[Recorded]) -> list[Span]:
    """Spans of every attempt of a step."""
    own: dict[str, list[Recorded]] = defaultdict(list)
    shared: list[Recorded] = []
    for record in records:
        attempt = getattr(record.event, "attempt", None)
        if isinstance(attempt, str):
            own[attempt].append(record)
        else:
            shared.append(record)
    return [s for a, mine in own.items() for s in spans_of(sorted([*mine, *shared], key=lambda r: r.seq), a)]


def _readable(span: Span) -> ReadableSpan:
    context = _context(span.trace_id, span.span_id)
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=_context(span.trace_id, span.parent_id) if span.parent_id else None,
        resource=_RESOURCE,
        attributes={f"rl360.{k}": v for k, v in span.attributes.items()},
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.OK),
        start_time=int(span.start * 1e9),
        end_time=int(span.end * 1e9),
        instrumentation_scope=_SCOPE,
    )


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
