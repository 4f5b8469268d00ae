"""One trajectory as a trace, rebuilt from the journal alone."""

from __future__ import annotations

from rl360.bus import tracing
from rl360.launch.trace import otlp_json, spans_of, waterfall
from tests.launch.story import GOOD, LOST, RUN, records


def test_every_phase_and_turn_is_a_span_of_one_trace() -> None:
    spans = spans_of(records(), GOOD)
    assert spans[0].name == f"attempt {GOOD}"
    assert {s.name for s in spans[1:]} == {"phase/queue", "phase/setup", "phase/agent", "turn/1", "turn/2", "merge", "filter", "train"}
    assert {s.trace_id for s in spans} == {tracing.trace_id(RUN, GOOD)}
    by_name = {s.name: s for s in spans}
    assert by_name["turn/2"].parent_id == by_name["phase/agent"].span_id
    assert by_name["phase/agent"].parent_id == spans[0].span_id
    assert spans[0].attributes["reward"] == 1.0
    assert by_name["filter"].attributes["fate"] == "dropped"


def test_a_failed_attempt_shows_its_cause() -> None:
    root = spans_of(records(), LOST)[0]
    assert root.error == "sandbox/lost: OSError"
    assert "reward" not in root.attributes


def test_an_unknown_attempt_has_no_spans() -> None:
    assert spans_of(records(), "t9-g000-a0") == []


def test_waterfall_has_a_line_a_span() -> None:
    spans = spans_of(records(), GOOD)
    lines = waterfall(spans).splitlines()
    assert len(lines) == len(spans) + 1
    assert all("|" in line and "ms" in line for line in lines[1:])


def test_otlp_json_has_the_ids_that_headers_carry() -> None:
    document = otlp_json(spans_of(records(), GOOD))
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    header = tracing.traceparent(RUN, GOOD, "attempt")
    assert header == f"00-{spans[0]['traceId']}-{spans[0]['spanId']}-01"
    assert spans[1]["parentSpanId"] == spans[0]["spanId"]
