"""What a runner has, as its attempts see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from rl360.agents.admission import Admission
from rl360.agents.harness.base import Assignment, Harness
from rl360.agents.sandbox.base import Sandbox
from rl360.agents.session import Sessions
from rl360.agents.staging import Staged
from rl360.agents.tasks import Task
from rl360.agents.waves import Start
from rl360.bus.events import Event, RolloutAdmitted
from rl360.config import Agent


@dataclass(frozen=True, kw_only=True)
class Shop:
    """What a runner lends to each of its attempts. `sandbox_of` makes a sandbox, unstarted, for a session.

    `start_of` says what an attempt at a task needs of the node, not before a time (unix seconds); `retry_at`, when a start
    that failed so many times is tried again, if at all.
    """

    run: str
    node: str
    image: str
    config: Agent
    up: float  # when the run was last started, unix seconds
    sessions: Sessions
    find_task: Callable[[str, str], tuple[Task, Staged]]
    admission: Admission
    start_of: Callable[[str, Task, Staged, float], Start]
    retry_at: Callable[[int], float | None]
    sandbox_of: Callable[[RolloutAdmitted, str, Task, Staged, float], Sandbox]
    harness_of: Callable[[Assignment], Harness]
    scratch: Path
    artifacts: Path  # what tasks ask to keep, in a folder a session
    pool: Executor
    announce: Callable[[Event], Awaitable[None]]  # without waiting for a receipt: phases are news, not outcomes
    claim: Callable[[Event], Awaitable[bool]]  # record it; False: the journal holds another's
