"""What is said about a whole run from its journal: audit, trace, summary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from rl360.audit import audit, notes
from rl360.bus.blobs import BlobStore
from rl360.bus.connection import BusError
from rl360.dash.fold import RunView
from rl360.journal.source import Reading
from rl360.launch import summary, trace
from rl360.launch.journal_files import open_source, records


def audit_run(path: Path, *, as_json: bool) -> int:
    """Print the findings of a run's audit; 1 when there is one."""

    async def read() -> Reading:
        async with open_source(path) as source:
            return await source.read()

    journal = asyncio.run(read())
    findings = audit(journal, BlobStore(path / "blobs"))
    if as_json:
        print(json.dumps([f.as_dict() for f in findings]))
    else:
        print(*findings, *notes(journal), f"{len(findings)} findings" if findings else "clean: every rule holds", sep="\n")
    return 1 if findings else 0


def trace_attempt(path: Path, attempt: str, otlp: Path | None) -> int:
    """Print one attempt's spans as a waterfall; write them as OTLP JSON when asked."""
    spans = trace.spans_of(asyncio.run(records(path)), attempt)
    if not spans:
        raise BusError(f"{path}: the journal has no attempt {attempt!r} (names look like t3-g004-a1)")
    print(trace.waterfall(spans))
    if otlp is not None:
        otlp.write_text(json.dumps(trace.otlp_json(spans), indent=1))
    return 0


def summarise(paths: Sequence[Path], picture: Path | None) -> int:
    """Print the summary of each run and draw them in one picture."""
    views: list[tuple[str, RunView]] = []
    for path in paths:
        view = RunView()
        for record in asyncio.run(records(path)):
            view.on(record)
        views.append((path.name, view))
        print("\n".join(summary.lines(view, path)))
    out = picture or paths[0] / "reward.svg"
    if summary.draw(views, out):
        print(f"reward picture: {out}")
    return 0
