"""A place is ready for its agent when the step's setup.sh ended well and every healthcheck passed; else a typed failure of setup."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from typing import Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import ExecResult, Sandbox
from rl360.agents.staging import Staged
from rl360.agents.task_file import HealthcheckSection
from rl360.agents.tasks import Task
from rl360.bus.events import Boundary, Cause

SETUP: Final = "setup.sh"
"""Of a step's workdir/: run in the workdir before the step's agent."""
_TAIL: Final = 300

Clock = Callable[[], float]


def make_ready(
    sandbox: Sandbox,
    task: Task,
    staged: Staged,
    timeout: float,
    *,
    clock: Clock = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Run what stands before the agent, in `timeout` seconds. Raises InfraError (sandbox), as `SetupFailed` or `Unhealthy`."""
    end = clock() + timeout
    if task.step and staged.environment is not None and (staged.environment / SETUP).is_file():
        result = sandbox.exec(f"bash {shlex.quote(f'{task.workdir}/{SETUP}')}", max(0.0, end - clock()))
        if result.status != 0 or result.timed_out:
            raise _failed(f"{SETUP} of step {task.step!r} {_said(result)}", "SetupFailed", result)
    for check in task.healthchecks:
        _wait_healthy(sandbox, check, end, clock, pause)


def _wait_healthy(sandbox: Sandbox, check: HealthcheckSection, end: float, clock: Clock, pause: Callable[[float], None]) -> None:
    """Docker's rule: `retries` failures in a row end it, those of the start period count for nothing, one success is enough."""
    grace, failures = clock() + check.start_period_sec, 0
    while True:
        began = clock()
        result = sandbox.exec(check.command, min(check.timeout_sec, max(0.0, end - began)))
        if result.status == 0 and not result.timed_out:
            return
        failures += began >= grace
        if failures >= check.retries or clock() >= end:
            raise _failed(f"the healthcheck {check.command!r} never passed: the last of them {_said(result)}", "Unhealthy", result)
        pause(min(check.interval_sec if began >= grace else check.start_interval_sec, max(0.0, end - clock())))


def _said(result: ExecResult) -> str:
    how = "was cut off by its clock" if result.timed_out else f"ended with {result.status}"
    return f"{how}; it said: {result.output[-_TAIL:].strip() or 'nothing'}"


def _failed(why: str, exception: str, result: ExecResult) -> InfraError:
    cause = Cause.TIMEOUT if result.timed_out else Cause.START_FAILED
    return InfraError(Boundary.SANDBOX, cause, why, exception=exception)
