"""Runs that were played in memory (`tests.trainer.world`), laid down as the folder of a run that is over."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from rl360.bus import events as ev
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus
from rl360.config import Config
from rl360.launch.rundir import RunDir
from rl360.launch.stored import served
from tests.trainer.world import World, config_of


def config() -> Config:
    return config_of(trainer={"loss_reduction": "sample_mean"})


def behaviour(a: ev.RolloutAdmitted, rng: object) -> float | ev.Cause:
    """Kept groups, a dropped one, failures."""
    if a.index == 3:
        return ev.Cause.LOST
    return 1.0 if a.group == 2 else float(a.index % 2)


def play(folder: Path) -> World:
    """Three steps, evaluated."""
    world = World(config(), folder, seed=5, behaviour=behaviour)
    world.play()
    return world


async def lay_down(world: World, path: Path) -> Path:
    """Its journal in a store of its own, published as its workers would have."""
    folder = RunDir(path)
    folder.create(world.config)
    (path / "nats" / "store").mkdir()
    shutil.copytree(world.blobs.root, path / "blobs", dirs_exist_ok=True)
    async with served(folder) as address, Bus.connect(address, world.config.run.name, BlobStore(path / "blobs")) as bus:
        await bus.create_streams()
        await asyncio.gather(*[await bus.submit(r.event) for r in world.journal.records])
    return path
