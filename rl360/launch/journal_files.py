"""Reading a run's journal after the run (or during it): audit, trace, summary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rl360.audit import audit, notes
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus
from rl360.bus.codec import Recorded
from rl360.bus.connection import BusError
from rl360.config import ConfigError
from rl360.dash.fold import RunView
from rl360.journal.archive import ArchiveSource, is_archive
from rl360.journal.source import Reading, Source
from rl360.journal.stream import StreamSource
from rl360.launch import summary, trace
from rl360.launch.rundir import RunDir
from rl360.launch.stored import served


@asynccontextmanager
async def open_source(path: Path, journal: str = "") -> AsyncGenerator[Source]:
    """The journal of the run in `path`, or one that a step was copied into (`replay --into`).

    Raises ConfigError when there is no run, BusError or JournalError when it can't be read.
    """
    folder = RunDir(path.absolute())
    config = folder.config
    if is_archive(folder.path):
        if journal:
            raise ConfigError(f"{path} is an imported archive: it has one journal, of run {config.run.name}")
        yield ArchiveSource(folder.path)
        return
    async with (
        served(folder) as address,
        Bus.connect(address, journal or config.run.name, BlobStore(folder.path / "blobs"), name="reader") as bus,
    ):
        yield StreamSource(bus, live=address.url == folder.addresses.nats)


async def records(path: Path, steps: Collection[int] | None = None, *, journal: str = "") -> list[Recorded]:
    """The whole journal of a run, or what `steps` need of it."""
    async with open_source(path, journal) as source:
        return await source.records(steps)


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
