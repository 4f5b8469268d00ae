"""The verifier where the task wants it: in the agent's sandbox once everything of the agent's is dead, or in a place of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rl360.agents.artifacts import hand_over
from rl360.agents.outcomes import boundary
from rl360.agents.sandbox.base import Sandbox
from rl360.agents.staging import Staged
from rl360.agents.tasks import Task
from rl360.agents.verify import Verdict, verify
from rl360.bus.events import Boundary


def judge(
    sandbox: Sandbox, task: Task, staged: Staged, original: Staged, timeout: float, apart: Callable[[Task, Staged], Sandbox]
) -> Verdict:
    """Run the verifier in `timeout` seconds. Raises InfraError when there is no reward to trust; never a 0.

    A separate verifier sees the task's `original` files and the agent's artifacts; `apart` makes its sandbox, unstarted, and
    closes it later.
    """
    end = time.monotonic() + timeout
    if not task.separate_verifier:
        return verify(sandbox, task, staged, started=time.time(), timeout=timeout)
    sandbox.kill_all()
    files = replace(original, tests=staged.tests, solution=None, steps=())
    place = apart(task, files)
    place.start()
    with boundary(Boundary.COLLECT):
        hand_over(sandbox.workdir, task, place.workdir)
    return verify(place, task, files, started=time.time(), timeout=max(0.0, end - time.monotonic()))
