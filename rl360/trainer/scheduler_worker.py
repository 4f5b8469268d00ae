"""The scheduler's process: reads the run's task pool and is the shell of `Scheduler`."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Final

from rl360.agents.tasks import Task, load_tasks
from rl360.bus.worker import WorkerContext, react
from rl360.trainer.draw import TaskRef
from rl360.trainer.schedule import FOLDED, Scheduler, TaskPool

_TICK: Final = 0.05
"""Seconds between two looks at waves and deadlines."""


async def main(ctx: WorkerContext) -> None:
    """Schedule the run until `ctx.stop` is set. Raises TaskError when the run's tasks can't be read."""
    pool = await asyncio.to_thread(read_pool, ctx.dir / "tasks")
    ctx.log.info("task pool: %d for training, %d held out", len(pool.train), len(pool.held_out))
    machine = Scheduler(ctx.bus.run, ctx.config, pool)
    await react(ctx.bus, machine, types=FOLDED, stop=ctx.stop, tick=_TICK, on_tick=machine.on_tick)


def read_pool(folder: Path) -> TaskPool:
    """Tasks of `folder`/train and, when it is there, `folder`/eval. Raises TaskError."""
    held_out = folder / "eval"
    return TaskPool(
        train=tuple(map(_ref, load_tasks(folder / "train"))),
        held_out=tuple(map(_ref, load_tasks(held_out))) if held_out.is_dir() and any(held_out.iterdir()) else (),
    )


def _ref(task: Task) -> TaskRef:
    return TaskRef(
        name=task.name,
        digest=task.digest,
        domain=task.domain,
        agent_timeout=task.agent_timeout or math.inf,
        verifier_timeout=task.verifier_timeout or math.inf,
    )
