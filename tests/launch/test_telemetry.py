"""Export never stops training, whatever the collector does (CASES 43)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.launch.telemetry import Telemetry
from tests.launch.story import records


class Refusing(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


async def test_a_closed_step_is_exported_with_its_attempts() -> None:
    memory = InMemorySpanExporter()
    telemetry = Telemetry(memory)
    for record in records():
        telemetry.on(record)
    await asyncio.wait_for(telemetry.close(), 10)
    names = [s.name for s in memory.get_finished_spans()]
    assert "turn/1" in names and sum(n.startswith("attempt ") for n in names) == 2
    assert telemetry.sent == len(names)


async def test_an_evaluation_is_exported_as_well_and_nothing_is_kept_of_what_closed() -> None:
    memory = InMemorySpanExporter()
    telemetry = Telemetry(memory)
    for record in records():
        telemetry.on(as_evaluation(record))
    await asyncio.wait_for(telemetry.close(), 10)
    sent = telemetry.sent
    assert sent == len(memory.get_finished_spans()) > 0
    for record in records():
        telemetry.on(as_evaluation(record))  # late ones
    await asyncio.wait_for(telemetry.close(), 10)
    assert telemetry.sent == sent


def as_evaluation(record: Recorded) -> Recorded:
    event = record.event
    fields = {"purpose": ev.Purpose.EVAL} if "purpose" in event.__struct_fields__ else {}
    if isinstance(attempt := getattr(event, "attempt", None), str) and attempt:
        fields["attempt"] = attempt.replace("t0-", "e0-", 1)
    return Recorded(record.seq, record.time, msgspec.structs.replace(event, **fields))


class Raising(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise ConnectionError("reset by peer")


async def test_an_exporter_that_raises_is_counted_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(Raising())
    for record in records():
        telemetry.on(record)
    await asyncio.wait_for(telemetry.close(), 10)
    assert telemetry.failed > 0 and "ConnectionError: reset by peer" in caplog.text


async def test_a_collector_that_refuses_is_counted_and_no_error() -> None:
    telemetry = Telemetry(Refusing())
    for record in records():
        telemetry.on(record)
    await asyncio.wait_for(telemetry.close(), 10)
    assert (telemetry.sent, telemetry.failed > 0) == (0, True)


@pytest.mark.parametrize("away", [True, False], ids=["away", "hangs"])
async def test_cases_43_a_collector_that_is_away_or_hangs_holds_nobody_up(away: bool) -> None:
    arrived, over = asyncio.Event(), asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await over.wait()
        writer.close()

    collector = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = collector.sockets[0].getsockname()[1]
    if away:
        collector.close()
    telemetry = Telemetry(OTLPSpanExporter(endpoint=f"http://127.0.0.1:{port}/v1/traces", timeout=2))
    try:
        for record in records():
            telemetry.on(record)
        if not away:
            await asyncio.wait_for(arrived.wait(), 10)
            assert telemetry.failed == 0, "an export under way leaves the event loop to the run"
        await asyncio.wait_for(telemetry.close(), 10)
    finally:
        over.set()
        collector.close()
    assert (telemetry.sent, telemetry.failed > 0) == (0, True)
