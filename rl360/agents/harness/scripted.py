"""An agent that does what a list says, for tests and for checking a machine without a model.

Steps: "oracle" runs the task's own solution, "ask" or "ask: text" makes one model call and ignores the reply's calls,
"fail: text" lets the agent program fail, anything else is a shell command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl360.agents.harness.base import Assignment
from rl360.agents.harness.chat import Cancelled, ChatClient, SessionEnded
from rl360.agents.harness.mini_swe import TOOLS, observation
from rl360.agents.outcomes import InfraError
from rl360.bus.events import AgentEnd, Boundary, Cause

Json = dict[str, Any]


class Scripted:
    """A script on one attempt. What commands print goes into the conversation of later "ask" steps."""

    def __init__(self, given: Assignment) -> None:
        self._given = given
        self._client = ChatClient(given.base_url, given.key, session=given.session, deadline=given.deadline, traceparent=given.traceparent)
        self._cancelled = False
        self._messages: list[Json] = [
            {"role": "system", "content": given.config.system},
            {"role": "user", "content": given.task.instruction},
        ]

    def run(self) -> AgentEnd:
        try:
            for step in self._given.config.script:
                self._step(step)
        except Cancelled:
            return AgentEnd.TIMEOUT
        except SessionEnded as e:
            return {"length": AgentEnd.LENGTH, "context": AgentEnd.CONTEXT}.get(e.reason, AgentEnd.ERROR)
        except InfraError as e:
            if self._cancelled and e.cause is Cause.CANCELLED:
                return AgentEnd.TIMEOUT
            raise
        finally:
            self._client.close()
        return AgentEnd.SUBMITTED

    def cancel(self) -> None:
        self._cancelled = True
        self._client.cancel()

    def _step(self, step: str) -> None:
        if step == "ask" or step.startswith("ask:"):
            self._ask(step.partition(":")[2].strip())
        elif step.startswith("fail:"):
            raise RuntimeError(step.partition(":")[2].strip())
        elif step == "oracle":
            self._command(self._solution(), self._given.task.solution_env)
        else:
            self._command(step)

    def _ask(self, text: str) -> None:
        if text:
            self._messages.append({"role": "user", "content": text})
        reply = self._client.complete({**self._given.request, "messages": self._messages, "tools": TOOLS})
        said: Json = reply["choices"][0]["message"]
        self._messages.append({k: v for k, v in said.items() if v is not None})

    def _command(self, command: str, env: Mapping[str, str] | None = None) -> None:
        result = self._given.command(command, env)
        self._messages.append({"role": "user", "content": observation(result, self._given.config.observation_limit)})

    def _solution(self) -> str:
        solution = self._given.staged.solution
        if solution is None:
            raise InfraError(Boundary.AGENT, Cause.BAD_TASK, f"task {self._given.task.name!r} has no solution/solve.sh for the oracle")
        return (solution / "solve.sh").read_text(encoding="utf-8")
