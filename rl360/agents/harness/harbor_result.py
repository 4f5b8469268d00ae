"""What the result of a Harbor trial says about an attempt (S12, S13, S14). Pure.

Read are the exception's name and text and whether the agent had begun. Harbor's rewards, its validity and what it calls a
timeout are not: it names a socket's TimeoutError an AgentTimeoutError and gives it reward 0.
"""

from __future__ import annotations

from typing import Final

import msgspec

from rl360.agents.outcomes import InfraError
from rl360.bus.events import AgentEnd, Boundary, Cause

POLICY: Final = {"ContextLengthExceededError": AgentEnd.CONTEXT, "OutputLengthExceededError": AgentEnd.LENGTH}
"""What the policy's own words can cause, when the session didn't say so itself."""

_SESSION: Final = {
    "APIConnectionError": Cause.LOST,
    "APIError": Cause.LOST,
    "InternalServerError": Cause.LOST,
    "ServiceUnavailableError": Cause.LOST,
    "Timeout": Cause.LOST,
    "NotFoundError": Cause.LOST,
    "AuthenticationError": Cause.REFUSED,
    "BadRequestError": Cause.REFUSED,
    "PermissionDeniedError": Cause.REFUSED,
    "RateLimitError": Cause.REFUSED,
    "UnprocessableEntityError": Cause.REFUSED,
}
"""litellm's names for a failed model call."""

_AGENT: Final = {
    # Harbor's clock is set beyond every clock of ours: this is a TimeoutError of some socket's.
    "AgentTimeoutError": Cause.LOST,
    "TimeoutError": Cause.LOST,
    "ConnectionError": Cause.LOST,
    "ConnectionResetError": Cause.LOST,
    "BrokenPipeError": Cause.LOST,
    "ConnectionRefusedError": Cause.REFUSED,
    "MemoryError": Cause.OUT_OF_MEMORY,
    "CancelledError": Cause.CANCELLED,
}
_TERMINAL: Final = "failed to send"
"""terminus-2's RuntimeError when its tmux is gone: whoever types into it can end it."""


class _Raised(msgspec.Struct):
    exception_type: str
    exception_message: str = ""


class _Phase(msgspec.Struct):
    started_at: str | None = None


class _Result(msgspec.Struct):
    exception_info: _Raised | None = None
    agent_execution: _Phase | None = None


def agent_end(result: bytes) -> AgentEnd:
    """How the agent ended. Raises InfraError for what isn't the policy's doing, and for a file that is no result."""
    try:
        read = msgspec.json.decode(result, type=_Result)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InfraError(Boundary.AGENT, Cause.UNKNOWN, f"Harbor's result.json can't be read: {e}", exception=type(e).__name__) from None
    raised = read.exception_info
    if raised is None:
        return AgentEnd.SUBMITTED
    name, said = raised.exception_type, raised.exception_message
    if read.agent_execution is None or read.agent_execution.started_at is None:
        raise InfraError(Boundary.AGENT, Cause.START_FAILED, f"before the agent began: {name}: {said}", exception=name)
    if name in POLICY:
        return POLICY[name]
    if name == "RuntimeError" and _TERMINAL in said:
        return AgentEnd.ERROR
    if name in _SESSION:
        raise InfraError(Boundary.SESSION, _SESSION[name], said, exception=name)
    raise InfraError(Boundary.AGENT, _AGENT.get(name, Cause.UNKNOWN), f"{name}: {said}", exception=name)
