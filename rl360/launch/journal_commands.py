"""`rl360 journal ls`, `tail`, `export` and `import`: what a run's journal holds, and all of it in one file."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Final

from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.client import Reader
from rl360.bus.codec import Message
from rl360.bus.connection import BusError
from rl360.config import ConfigError
from rl360.journal import exporting, importing, pins
from rl360.journal.lines import Filter, json_line, line
from rl360.journal.listing import Listing, amount
from rl360.journal.manifest import POLICY
from rl360.journal.source import Source
from rl360.journal.stream import StreamSource
from rl360.launch.journal_files import open_source
from rl360.launch.keeping import needs_of
from rl360.trainer import checkpoints

_POLL: Final = 0.5
_AWAY: Final = 10.0  # seconds without a server after which a run is not followed any longer


def ls(path: Path) -> int:
    """Print what each step has."""

    async def listing() -> tuple[Listing, Source]:
        found = Listing()
        async with open_source(path) as source:
            async for message in source.messages():
                found.on(message)
            return found, source

    found, source = asyncio.run(listing())
    if source.steps is not None:
        print(f"exported with step {', '.join(map(str, sorted(source.steps)))} alone")
    print(*found.lines(source.run, pins.pinned(path), source.blobs.size), sep="\n")
    return 0


# ------------------------------------------------------------------------------------------------ tail


def tail(path: Path, chosen: Filter, *, last: int, follow: bool, as_json: bool) -> int:
    """Print the last events, then those that come, until the run is over."""
    show = json_line if as_json else line

    async def run() -> None:
        async with open_source(path) as source:
            if follow and not (isinstance(source, StreamSource) and source.live):
                raise ConfigError(f"{path}: this run is not going on, nothing can be followed: leave --follow away")
            seen = await source.bus.last_seq() if isinstance(source, StreamSource) else 0
            for message in await _newest(source, chosen, last):
                print(show(message), flush=True)
                seen = max(seen, message.seq)
            if follow and isinstance(source, StreamSource):
                async for message in coming(source, chosen, seen + 1):
                    print(show(message), flush=True)

    asyncio.run(run())
    return 0


async def _newest(source: Source, chosen: Filter, count: int) -> Collection[Message]:
    patterns = chosen.patterns(source.run)
    if not isinstance(source, StreamSource):
        messages = source.messages()
    elif chosen == Filter():
        messages = source.bus.matching(patterns, start=max(1, await source.bus.last_seq() - count + 1))
    else:
        messages = source.bus.matching(patterns)
    return deque([m async for m in messages if chosen.shows(m)], maxlen=count)


async def coming(source: StreamSource, chosen: Filter, start: int) -> AsyncIterator[Message]:
    """What is published from now on, up to the end of the run. Raises BusError when the run's server goes away for long."""
    bus = source.bus
    async with Reader(bus.client, subjects.stream(bus.run), (), start=start) as reader:
        heard = time.monotonic()
        while time.monotonic() - heard < _AWAY:
            message = await reader.next_message(timeout=_POLL)
            if message is not None or bus.client.is_connected:
                heard = time.monotonic()
            if message is None:
                continue
            if chosen.shows(message):
                yield message
            if subjects.parse(message.subject).type == ev.RunFinished.__name__:
                return
    raise BusError(f"the server of run {bus.run} is gone: the run was killed, or its machine was; read it again without --follow")


# ------------------------------------------------------------------------------------------------ one file


def export(path: Path, file: Path, steps: Collection[int], *, with_checkpoint: bool) -> int:
    """Write a run's journal, or what some of its steps need, into one file."""
    if with_checkpoint and not steps:
        raise ConfigError("--with-checkpoint goes with --step: it takes the weights that the step started from")

    async def run() -> None:
        async with open_source(path) as source:
            chosen = await _weights(path, source, steps) if with_checkpoint else {}
            recipe = (path / "recipe.json").read_bytes()
            written = await exporting.write(source, file, recipe=recipe, steps=steps or None, folders=chosen)
        what = "the whole journal" if not steps else f"step {', '.join(map(str, sorted(steps)))}"
        blobs = sum(name.startswith("blobs/") for name in written.members)
        print(f"{what} of run {written.run}: {written.messages} events, {blobs} blobs, {sum(n != POLICY for n in chosen)} checkpoints")
        if written.pruned:
            print(f"{written.pruned} blobs are not in it: retention had removed them")
        print(f"wrote {file} ({amount(file.stat().st_size)}); read it elsewhere after: rl360 journal import {file} DIR")

    asyncio.run(run())
    return 0


async def _weights(path: Path, source: Source, steps: Collection[int]) -> dict[str, Path]:
    """Folders that a gradient of these steps is taken from. Raises CheckpointError when one that a step started from is gone."""
    needs = await needs_of(source, steps)
    root = path / checkpoints.FOLDER
    held = {version: name for name, version in checkpoints.versions(root).items()}
    for step in sorted(steps):
        if (version := needs.trained_on(step)) > 0 and version not in held:
            raise checkpoints.CheckpointError(
                f"{root}: no checkpoint of version {version}, which step {step} started from: it was pruned; leave --with-checkpoint away"
            )
    names = [held[v] for v in sorted(needs.versions(steps) & held.keys())]
    found = {f"{checkpoints.FOLDER}/{name}": checkpoints.verify(root / name).path for name in names}
    return found | ({POLICY: path / POLICY} if (path / POLICY).is_dir() else {})


def import_(file: Path, path: Path) -> int:
    """Lay an exported journal down as a folder that is read like a run's."""
    manifest = importing.lay_down(file, path)
    cut = "" if manifest.steps is None else f", what step {', '.join(map(str, manifest.steps))} needs"
    print(f"imported run {manifest.run}{cut}: {manifest.messages} events into {path}")
    print(f"check it: rl360 audit {path}")
    return 0
