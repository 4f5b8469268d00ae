"""The group filter's process: the shell of `GroupFilter`."""

from __future__ import annotations

from rl360.bus.worker import WorkerContext, react
from rl360.trainer.group_filter import FOLDED, GroupFilter
from rl360.trainer.groups import Rules


async def main(ctx: WorkerContext) -> None:
    """Decide groups until `ctx.stop` is set."""
    await react(ctx.bus, GroupFilter(Rules.of(ctx.config)), types=FOLDED, stop=ctx.stop)
