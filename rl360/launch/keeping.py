"""`rl360 journal pin`, `unpin` and `prune`: what of a run is kept, and for how long."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from rl360.bus import events as ev
from rl360.bus.journal import DEDUPE_WINDOW
from rl360.config import ConfigError
from rl360.journal import pins, retention
from rl360.journal.listing import amount
from rl360.journal.source import Source
from rl360.journal.stream import StreamSource
from rl360.launch.journal_files import open_source
from rl360.trainer import checkpoints

_SETTLED: Final = DEDUPE_WINDOW  # seconds after which a writer's event names the blob that it stored


def pin(path: Path, step: int, *, on: bool) -> int:
    """Keep a step from being pruned, or let it be."""

    async def needs() -> retention.Needs:
        async with open_source(path) as source:
            return await needs_of(source, [step])

    found = asyncio.run(needs())
    if step not in found.opened:
        raise ConfigError(f"{path}: the run has no step {step}: `rl360 journal ls {path}` shows its steps")
    if on and found.pruned.covers(step):
        raise ConfigError(f"{path}: step {step} was pruned already; its events are there, its blobs and checkpoints are gone")
    pins.pin(path, step, on=on)
    print(f"step {step} is {'pinned' if on else 'not pinned'}; pinned steps: {', '.join(map(str, sorted(pins.pinned(path)))) or 'none'}")
    return 0


def prune(path: Path, keep_steps: int) -> int:
    """Remove blobs and checkpoints that only steps before the newest `keep_steps` need. Events stay."""
    if keep_steps < 1:
        raise ConfigError(f"--keep-steps {keep_steps}: at least the newest step is kept")

    async def run() -> ev.BlobsPruned | None:
        async with open_source(path) as source:
            if not isinstance(source, StreamSource):
                raise ConfigError(f"{path} is an imported archive, to which nothing is written: remove the folder, or export less")
            before = time.time() - _SETTLED if source.live else math.inf
            return await _prune(path, source, keep_steps, before)

    done = asyncio.run(run())
    if done is None:
        print(f"nothing to remove: only what the newest {keep_steps} steps and pinned ones need is there")
        return 0
    kept = f" but {', '.join(map(str, done.kept))} (pinned)" if done.kept else ""
    print(f"pruned steps {done.first} to {done.last}{kept}:")
    print(f"  {done.blobs} blobs, {amount(done.blob_bytes)}; {len(done.checkpoints)} checkpoints, {amount(done.checkpoint_bytes)}")
    print("  events stay: the journal refuses to delete")
    return 0


async def _prune(path: Path, source: StreamSource, keep_steps: int, before: float) -> ev.BlobsPruned | None:
    """Say it, then do it: a crash in between leaves blobs that the next prune removes. `before`: younger blobs are left (unix seconds)."""
    root = path / checkpoints.FOLDER
    plan = retention.plan(await needs_of(source), checkpoints.versions(root), keep_steps=keep_steps, pinned=pins.pinned(path))
    sizes = {d: size for d in plan.blobs if (size := source.blobs.size(d, before=before)) is not None} if plan else {}
    if plan is None or not (sizes or plan.checkpoints):
        return None
    event = ev.BlobsPruned(
        run=source.run,
        first=plan.first,
        last=plan.last,
        kept=plan.kept,
        blobs=len(sizes),
        blob_bytes=sum(sizes.values()),
        checkpoints=plan.checkpoints,
        checkpoint_bytes=sum(p.stat().st_size for name in plan.checkpoints for p in (root / name).rglob("*") if p.is_file()),
    )
    await source.bus.publish(event)
    for digest in sizes:
        source.blobs.remove(digest, before=before)
    for name in plan.checkpoints:
        checkpoints.remove(root / name)
    return event


async def needs_of(source: Source, steps: Collection[int] | None = None) -> retention.Needs:
    needs = retention.Needs()
    async for message in source.messages(steps):
        needs.on(message)
    return needs
