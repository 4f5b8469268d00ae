"""What an agent is given, and what a runner may ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import ExecResult, Sandbox
from rl360.agents.staging import Staged
from rl360.agents.tasks import Task
from rl360.bus.events import AgentEnd, Boundary, Cause
from rl360.config import Agent

DEADLINE: Final = "RL360_DEADLINE"
"""Environment variable of every command: the agent's deadline in unix seconds (S15)."""

_LONGEST: Final = 128 << 10
"""Bytes of one argument that Linux takes (MAX_ARG_STRLEN), its closing NUL among them."""
_CANNOT_RUN: Final = 126

PROBE_SECONDS: Final = 5.0
"""A sandbox in which `true` takes longer has hung. Nothing that an agent left running inside slows it that much."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One attempt as its agent sees it. `deadline` in unix seconds; `scratch` is a folder of the runner's own."""

    task: Task
    staged: Staged
    sandbox: Sandbox
    config: Agent
    session: str
    base_url: str
    key: str
    deadline: float
    traceparent: str
    scratch: Path
    request: Mapping[str, Any] = field(default_factory=lambda: {"model": "policy"})  # goes into every call of the model

    @property
    def env(self) -> Mapping[str, str]:
        """What every command of the agent's is told."""
        return {DEADLINE: f"{self.deadline:.3f}"}

    def command(self, text: str, env: Mapping[str, str] | None = None) -> ExecResult:
        """Run a command of the agent's for at most `agent.command_timeout` seconds.

        One that ran out of them may be the agent's doing, and so is a sandbox in which `true` ends once what the agent left
        running is dead: it may stop every process that comes. One in which not even then `true` ends is not (S13, S14).
        Raises InfraError for the sandbox's failures.
        """
        if why := _unfit(text):
            return ExecResult(_CANNOT_RUN, f"bash: {why}\n")
        result = self.sandbox.exec(text, self.config.command_timeout, {**self.env, **(env or {})})
        if result.timed_out and self._hangs():
            self.sandbox.kill_commands()
            if self._hangs():
                raise InfraError(Boundary.SANDBOX, Cause.LOST, f"the sandbox hangs: `true` did not end in {PROBE_SECONDS:g} s")
        return result

    def _hangs(self) -> bool:
        return self.sandbox.exec("true", PROBE_SECONDS).timed_out


def _unfit(command: str) -> str:
    """Why no kernel starts a shell with this command; "" when one does.

    >>> _unfit("echo \\0"), _unfit("x" * 200_000)
    ('the command holds a NUL', 'Argument list too long')
    """
    if "\0" in command:
        return "the command holds a NUL"
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        return "the command is no text"
    return "Argument list too long" if size >= _LONGEST else ""


class Harness(Protocol):
    """One agent on one attempt."""

    def run(self) -> AgentEnd:
        """Run the agent to its end; blocks. Raises InfraError for what isn't the policy's doing."""
        ...

    def cancel(self) -> None:
        """The agent's clock ran out: make `run` return soon. From any thread; the sandbox's processes are killed besides."""
        ...
