"""`rl360 worker merger`: folds the journal, publishes one `TrajectoryMerged` a sample."""

from __future__ import annotations

from collections import Counter

from rl360.bus.client import Bus
from rl360.bus.events import TrajectoryMerged
from rl360.bus.worker import WorkerContext, react
from rl360.sessions.merger import TYPES, Merger


async def main(ctx: WorkerContext) -> None:
    """Merge until `ctx.stop`."""
    blobs = ctx.bus.blobs
    done = await merged_sessions(ctx.bus)
    merger = Merger(pack=blobs.pack, unpack=blobs.unpack, replay=ctx.config.engine.routed_experts, done=done)
    await react(ctx.bus, merger, types=TYPES, stop=ctx.stop)


async def merged_sessions(bus: Bus) -> frozenset[str]:
    """Sessions all of whose samples the journal holds."""
    held: Counter[str] = Counter()
    wanted: dict[str, int] = {}
    async for recorded in bus.replay(types=[TrajectoryMerged]):
        event = recorded.event
        if isinstance(event, TrajectoryMerged):
            held[event.session] += 1
            wanted[event.session] = event.branches
    return frozenset(session for session, n in wanted.items() if held[session] >= n)
