"""Runs that were played in memory (`tests.trainer.world`): read as they are, or laid down as the folder of a run that is over."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from pathlib import Path
from unittest.mock import patch

from rl360.bus import events as ev
from rl360.bus import selection, subjects, tracing
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus
from rl360.bus.codec import DeadLetter, Message, Recorded, encode
from rl360.config import Config
from rl360.journal.source import Source
from rl360.launch.rundir import RunDir
from rl360.launch.stored import served
from rl360.trainer import checkpoints
from tests.trainer.world import RUN, World, config_of

LETTER = DeadLetter(stream_seq=9, consumer="runner", kind="max_deliver", reason="delivered too often", deliveries=3)


def config() -> Config:
    return config_of(trainer={"loss_reduction": "sample_mean"})


def behaviour(a: ev.RolloutAdmitted, rng: object) -> float | ev.Cause:
    """Kept groups, a dropped one, failures."""
    if a.index == 3:
        return ev.Cause.LOST
    return 1.0 if a.group == 2 else float(a.index % 2)


def play(folder: Path, steps: int = 3) -> World:
    """A few steps, evaluated. Samples are blobs, turns are in their events."""
    with patch("rl360.bus.blobs.INLINE_LIMIT", 100):
        world = World(config_of(run={"steps": steps}, trainer={"loss_reduction": "sample_mean"}), folder, seed=5, behaviour=behaviour)
        world.play()
    return world


def message(record: Recorded) -> Message:
    """As the journal would hold it."""
    event = record.event
    nanos = round(record.time * 1e6) * 1000 + 789
    return Message(record.seq, nanos, subjects.subject(event), subjects.msg_id(event), "1", tracing.traceparent_of(event), encode(event))


class MemorySource(Source):
    """A journal in memory."""

    def __init__(self, messages: Iterable[Message], blobs: BlobStore, letters: Sequence[DeadLetter] = (), run: str = RUN) -> None:
        super().__init__(run, blobs)
        self._messages, self._letters = list(messages), list(letters)

    @staticmethod
    def of(world: World, letters: Sequence[DeadLetter] = ()) -> MemorySource:
        return MemorySource(map(message, world.journal.records), world.blobs, letters)

    async def messages(self, steps: Collection[int] | None = None) -> AsyncIterator[Message]:
        parts = None if steps is None else {p.step: p for p in selection.parts(steps)}
        for m in self._messages:
            name = subjects.parse(m.subject)
            if parts is None or (name.step in parts and parts[name.step].has(name.type)):
                yield m

    async def dead_letters(self) -> list[DeadLetter]:
        return self._letters


def with_checkpoints(world: World, root: Path) -> None:
    """A checkpoint of every step, with a few bytes for weights."""
    source = root.parent / "policy"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    for event in world.journal.of(ev.StepTrained):
        weights = checkpoints.aside(root, event.step) / "weights"
        weights.mkdir(parents=True)
        (weights / "w.bin").write_bytes(bytes([event.step]) * 1000)
        checkpoints.commit(root, step=event.step, version=event.version, event=encode(event), hf_source=source)


async def lay_down(world: World, path: Path) -> Path:
    """Its journal in a store of its own, published as its workers would have."""
    folder = RunDir(path)
    folder.create(world.config)
    (path / "nats" / "store").mkdir()
    shutil.copytree(world.blobs.root, path / "blobs", dirs_exist_ok=True)
    with_checkpoints(world, path / checkpoints.FOLDER)
    async with served(folder) as address, Bus.connect(address, world.config.run.name, BlobStore(path / "blobs")) as bus:
        await bus.create_streams()
        await asyncio.gather(*[await bus.submit(r.event) for r in world.journal.records])
    return path
