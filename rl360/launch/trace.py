"""One attempt as spans, from the journal alone: pure functions over recorded events.

The ids are those that the live spans carry (`rl360.bus.tracing`), so both show as one trace in Jaeger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl360.bus import events as ev
from rl360.bus import tracing
from rl360.bus.codec import Recorded

_WIDTH = 48


@dataclass
class Span:
    """Times in unix seconds; `parent` is a span name ("" for the root)."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: float
    end: float
    depth: int
    error: str = ""
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])


def spans_of(records: Iterable[Recorded], attempt: str) -> list[Span]:
    """Spans of an attempt in order of start, the root first; empty when the journal doesn't know the attempt."""
    builder = _Builder(attempt)
    for record in records:
        builder.on(record)
    return builder.spans()


class _Builder:
    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._run, self._group = "", -1
        self._spans: list[Span] = []
        self._start = self._end = 0.0
        self._error = ""
        self._facts: dict[str, str | int | float | bool] = {}
        self._terminal = False
        self._step, self._version = -1, -1

    def on(self, record: Recorded) -> None:
        event = record.event
        if getattr(event, "attempt", None) == self._attempt:
            self._own(event, record.time)
        elif self._run and event.step == self._step:
            self._downstream(event, record.time)
        elif isinstance(event, ev.WeightsPushed) and event.version == self._version >= 0:
            self._add("push", record.time - event.seconds, record.time, 1, {"path": event.path, "version": event.version})
            self._version = -1

    def _own(self, event: ev.AnyEvent, time: float) -> None:
        if not self._run:
            self._run, self._step, self._start = event.run, event.step, time
        self._end = max(self._end, time)
        match event:
            case ev.RolloutRequested():
                self._group = event.group
                self._facts.update(task=event.task, group=event.group)
            case ev.RolloutPhase(end=float() as end):
                self._add(f"phase/{event.phase}", event.start, end, 1, {"session": event.session, "node": event.node})
            case ev.TurnCompleted():
                self._add(
                    f"turn/{event.turn}",
                    event.started,
                    event.ended,
                    2,
                    {
                        "prompt_tokens": event.prompt_tokens,
                        "cached_tokens": event.cached_tokens,
                        "output_tokens": event.output_ids.size // 4,
                        "finish_reason": event.finish_reason,
                        "generation": event.generation,
                        "version": event.spans[-1].version if event.spans else -1,
                        "format_error": event.format_error,
                    },
                )
            case ev.VerifierResult():
                self._outcome({"reward": event.reward, "agent_end": str(event.agent_end)}, "")
            case ev.InfraFailed():
                self._outcome(
                    {"cause": str(event.cause), "boundary": str(event.boundary)}, f"{event.boundary}/{event.cause}: {event.exception}"
                )
            case ev.TrajectoryMerged():
                self._add("merge", time, time, 1, {"tokens": event.tokens, "sampled": event.sampled})
            case _:
                pass

    def _outcome(self, facts: dict[str, str | int | float | bool], error: str) -> None:
        if not self._terminal:  # the first terminal outcome counts (S16)
            self._terminal, self._error = True, error
            self._facts.update(facts)

    def _downstream(self, event: ev.AnyEvent, time: float) -> None:
        match event:
            case ev.GroupDecided(group=self._group):
                mine = next((a for a in event.attempts if a.attempt == self._attempt), None)
                if mine is None:
                    return
                facts: dict[str, str | int | float | bool] = {
                    "fate": str(mine.fate),
                    "kept": event.kept,
                    "reason": event.reason or mine.reason,
                }
                if mine.advantage is not None:
                    facts["advantage"] = mine.advantage
                self._add("filter", time, time, 1, facts)
                self._end = max(self._end, time)
            case ev.StepTrained():
                start = time - sum(event.seconds.values())
                self._add("train", start, time, 1, {"version": event.version, "grad_norm": event.grad_norm, "samples": event.samples})
                self._version, self._end = event.version, max(self._end, time)
            case _:
                pass

    def _add(self, name: str, start: float, end: float, depth: int, facts: dict[str, Any]) -> None:
        parent = "attempt" if depth == 1 else "phase/agent"
        self._spans.append(
            Span(
                tracing.trace_id(self._run, self._attempt),
                tracing.span_id(self._run, self._attempt, name),
                tracing.span_id(self._run, self._attempt, parent),
                name,
                start,
                end,
                depth,
                attributes=facts,
            )
        )

    def spans(self) -> list[Span]:
        if not self._run:
            return []
        root = Span(
            tracing.trace_id(self._run, self._attempt),
            tracing.span_id(self._run, self._attempt, "attempt"),
            "",
            f"attempt {self._attempt}",
            self._start,
            max([self._end, *(s.end for s in self._spans)]),
            0,
            self._error,
            self._facts,
        )
        return [root, *sorted(self._spans, key=lambda s: (s.start, s.depth))]


def waterfall(spans: Sequence[Span]) -> str:
    """Spans as text: name, a bar on the trace's clock, milliseconds, facts."""
    root = spans[0]
    total = max(root.end - root.start, 1e-9)
    lines = [f"trace {root.trace_id}"]
    for span in spans:
        left = min(_WIDTH - 1, int(_WIDTH * max(0.0, span.start - root.start) / total))
        size = max(1, round(_WIDTH * (span.end - span.start) / total))
        bar = (" " * left + "█" * min(size, _WIDTH - left)).ljust(_WIDTH)
        facts = " ".join(f"{k}={v}" for k, v in span.attributes.items() if v != "")
        name = ("  " * span.depth + span.name).ljust(24)
        lines.append(
            f"{name} |{bar}| {1000 * (span.end - span.start):9.1f} ms  {facts}{'  ERROR ' + span.error if span.error else ''}".rstrip()
        )
    return "\n".join(lines)


def otlp_json(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as an OTLP/JSON `ExportTraceServiceRequest`."""
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": [_attribute("service.name", "rl360")]},
                "scopeSpans": [{"scope": {"name": "rl360.journal"}, "spans": [_otlp(s) for s in spans]}],
            }
        ]
    }


def _otlp(span: Span) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        **({"parentSpanId": span.parent_id} if span.parent_id else {}),
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(int(span.start * 1e9)),
        "endTimeUnixNano": str(int(span.end * 1e9)),
        "attributes": [_attribute(f"rl360.{k}", v) for k, v in span.attributes.items()],
        "status": {"code": 2, "message": span.error} if span.error else {"code": 1},
    }


def _attribute(key: str, value: str | int | float | bool) -> dict[str, Any]:
    match value:
        case bool():
            return {"key": key, "value": {"boolValue": value}}
        case int():
            return {"key": key, "value": {"intValue": str(value)}}
        case float():
            return {"key": key, "value": {"doubleValue": value}}
        case str():
            return {"key": key, "value": {"stringValue": value}}
