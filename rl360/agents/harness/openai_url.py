"""Any agent that takes an OpenAI URL: a command line, run inside the sandbox, whose only network is its session.

Its environment: OPENAI_BASE_URL, OPENAI_API_KEY, RL360_INSTRUCTION, RL360_DEADLINE (unix seconds).
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from rl360.agents.harness.base import Assignment
from rl360.agents.harness.relay import Relay
from rl360.agents.outcomes import InfraError
from rl360.bus.events import AgentEnd, Cause

_ENDS: Final = {"length": AgentEnd.LENGTH, "context": AgentEnd.CONTEXT, "turns": AgentEnd.TURNS}


class OpenAiUrl:
    """An external agent on one attempt."""

    def __init__(self, given: Assignment) -> None:
        self._given = given
        self._cancelled = False

    def run(self) -> AgentEnd:
        try:
            return asyncio.run(self._run())
        except InfraError as e:
            if self._cancelled and e.cause is Cause.CANCELLED:
                return AgentEnd.TIMEOUT
            raise

    def cancel(self) -> None:
        self._cancelled = True  # its processes are killed with the sandbox, and `run` ends by that

    async def _run(self) -> AgentEnd:
        given = self._given
        async with Relay(given, await asyncio.to_thread(given.sandbox.listen)) as relay:
            env = {
                **given.env,
                "OPENAI_BASE_URL": relay.url,
                "OPENAI_API_KEY": given.key,
                "RL360_INSTRUCTION": given.task.instruction,
            }
            result = await asyncio.to_thread(given.sandbox.exec, given.config.command, max(0.0, given.deadline - time.time()), env)
        if relay.ended:
            return _ENDS.get(relay.ended, AgentEnd.ERROR)
        if relay.fault is not None:
            raise relay.fault
        if result.timed_out:
            return AgentEnd.TIMEOUT
        return AgentEnd.SUBMITTED if result.status == 0 else AgentEnd.ERROR
