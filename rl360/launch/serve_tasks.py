"""`rl360 tasks serve`: tasks behind the HTTP routes that Miles calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aiohttp import web

from rl360.agents.harbor_api import HarborApi
from rl360.agents.playground import playground
from rl360.agents.runner import harness_maker
from rl360.agents.tasks import Task, TaskError
from rl360.launch import prepare
from rl360.launch.task_commands import chosen, recipe_of

ADMIN: Final = "HARBOR_ADMIN_SECRET"
"""Variable with the key of /flush, as Miles sends it; without one anybody who reaches the port may flush."""


def serve(root: Path, recipe: Path | None, overrides: Sequence[str], cache: Path, host: str, port: int, slots: int) -> int:
    """Serve until Ctrl-C or SIGTERM, which kills what runs and removes every sandbox."""
    config = recipe_of(recipe, overrides)
    prepare.agent(config)
    tasks = by_name(chosen(root, config))
    with playground(cache / "sandboxes", config, "serve") as ground:
        api = HarborApi(tasks, ground, harness_maker(config.agent, ground.scratch), slots, os.environ.get(ADMIN, ""))
        print(f"{len(tasks)} names of tasks at http://{host}:{port}/run", file=sys.stderr)
        web.run_app(api.app(), host=host, port=port, print=None, handler_cancellation=True)
    return 0


def by_name(tasks: Sequence[Task]) -> dict[str, Task]:
    """Tasks by their name and, where no name says otherwise, by their folder's. Raises TaskError for two of one name."""
    named: dict[str, Task] = {}
    for task in tasks:
        if task.name in named:
            raise TaskError(f"{task.dir}: its name {task.name!r} is that of {named[task.name].dir} too; rename one of them")
        named[task.name] = task
    return {**{task.dir.name: task for task in tasks}, **named}
