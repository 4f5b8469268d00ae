"""mini-swe-agent's DefaultAgent with a small model class of ours: one `bash` tool, no litellm, nothing written to disk.

The loop, the step limit and the flow of its exceptions are the agent's own. What it reads and says is ours: the system
text and the instruction go in as they stand, and a malformed reply stays in the history, so that its tokens train.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from rl360.agents.harness.base import Assignment
from rl360.agents.harness.chat import Cancelled, ChatClient, SessionEnded
from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import ExecResult
from rl360.bus.events import AgentEnd, Cause

Json = dict[str, Any]

SUBMIT_MARK: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMIT_COMMAND: Final = f"echo {SUBMIT_MARK}"
BAD_CALL: Final = "error: invalid tool call"
NO_OUTPUT: Final = "(no output)"
TOOLS: Final[list[Json]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Execute a bash command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]

_ENDS: Final = {"Submitted": AgentEnd.SUBMITTED, "LimitsExceeded": AgentEnd.TURNS}
_SESSION_ENDS: Final = {"length": AgentEnd.LENGTH, "context": AgentEnd.CONTEXT, "turns": AgentEnd.TURNS}


@cache
def load(scratch: Path) -> Any:
    """mini-swe-agent's parts: `DefaultAgent` (quietened), `FormatError`, `Submitted`. Raises ModuleNotFoundError.

    Its import prints, makes a settings folder and reads a .env from it: all of that is pointed at `scratch`.
    Call it once before threads do.
    """
    ours = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(scratch / "mini-swe-agent")}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        base: Any = importlib.import_module("minisweagent.agents.default").DefaultAgent
        exceptions: Any = importlib.import_module("minisweagent.exceptions")
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    class QuietAgent(base):
        """Texts are final, so no template is compiled; no trajectory is serialised at each step: the journal has it."""

        def _render_template(self, template: str) -> str:
            return template

        def get_template_vars(self, **kwargs: Any) -> Json:
            return kwargs

        def save(self, path: Path | None, *extra_dicts: Json) -> Json:
            return {}

    return SimpleNamespace(DefaultAgent=QuietAgent, FormatError=exceptions.FormatError, Submitted=exceptions.Submitted)


def observation(result: ExecResult, limit: int) -> str:
    """What the agent sees of a command: stripped output, cut to `limit` characters."""
    said = result.output.strip()[:limit]
    if result.timed_out:
        return f"{said}\n(timed out)".strip()
    return said or NO_OUTPUT


class MiniSwe:
    """mini-swe-agent on one attempt."""

    def __init__(self, given: Assignment) -> None:
        self._given = given
        self._parts = load(given.scratch)
        self._client = ChatClient(given.base_url, given.key, session=given.session, deadline=given.deadline, traceparent=given.traceparent)
        self._cancelled = False

    def run(self) -> AgentEnd:
        config = self._given.config
        agent: Any = self._parts.DefaultAgent(
            _Model(self._client, self._parts, config.observation_limit, self._given.request),
            _Environment(self._given, self._parts),
            system_template=config.system,
            instance_template=self._given.task.instruction,
            step_limit=config.max_turns,
            cost_limit=0.0,
            max_consecutive_format_errors=0,
        )
        try:
            end: Json = agent.run()
        except Cancelled:
            return AgentEnd.TIMEOUT
        except SessionEnded as e:
            return _SESSION_ENDS.get(e.reason, AgentEnd.ERROR)
        except InfraError as e:
            if self._cancelled and e.cause is Cause.CANCELLED:
                return AgentEnd.TIMEOUT
            raise
        finally:
            self._client.close()
        return _ENDS.get(str(end.get("exit_status")), AgentEnd.ERROR)

    def cancel(self) -> None:
        self._cancelled = True
        self._client.cancel()


class _Model:
    """The agent's model: the session behind an OpenAI URL."""

    def __init__(self, client: ChatClient, parts: Any, limit: int, request: Mapping[str, Any]) -> None:
        self.config = SimpleNamespace()
        self._client, self._parts, self._limit, self._request = client, parts, limit, request

    def query(self, messages: list[Json], **kwargs: Any) -> Json:
        """One turn. Raises FormatError with the reply itself and the error, for what is no call of the bash tool."""
        sent = [{k: v for k, v in m.items() if k != "extra"} for m in messages]
        reply = self._client.complete({**self._request, "messages": sent, "tools": TOOLS})
        said = cast(Json, reply["choices"][0]["message"])
        message: Json = {k: said[k] for k in ("role", "content", "tool_calls") if said.get(k) is not None}
        message.setdefault("content", "")
        actions = _actions(message)
        if actions is None:
            raise self._parts.FormatError({**message, "extra": {}}, {"role": "user", "content": BAD_CALL})
        return {**message, "extra": {"actions": actions, "cost": 0.0}}

    def format_message(self, **kwargs: Any) -> Json:
        return kwargs

    def format_observation_messages(self, message: Json, outputs: list[Json], template_vars: Json | None = None) -> list[Json]:
        ids = [call.get("id", "") for call in message["tool_calls"]]
        return [
            {"role": "tool", "tool_call_id": id_, "content": observation(o["result"], self._limit)}
            for id_, o in zip(ids, outputs, strict=True)
        ]

    def get_template_vars(self, **kwargs: Any) -> Json:
        return kwargs

    def serialize(self) -> Json:
        return {}


class _Environment:
    """The agent's shell: the sandbox."""

    def __init__(self, given: Assignment, parts: Any) -> None:
        self.config = SimpleNamespace()
        self._given, self._parts = given, parts

    def execute(self, action: Json, cwd: str = "") -> Json:
        """Run one command. Raises Submitted when its first line is the agent's mark.

        The bare submit command needs no shell to tell what it prints.
        """
        if action["command"].strip() == SUBMIT_COMMAND:
            raise self._submitted("")
        result = self._given.command(action["command"])
        first, _, rest = result.output.lstrip().partition("\n")
        if first.strip() == SUBMIT_MARK and result.status == 0:
            raise self._submitted(rest)
        return {"result": result}

    def _submitted(self, submission: str) -> Exception:
        extra = {"exit_status": "Submitted", "submission": submission}
        return self._parts.Submitted({"role": "exit", "content": submission, "extra": extra})

    def get_template_vars(self, **kwargs: Any) -> Json:
        return kwargs

    def serialize(self) -> Json:
        return {}


def _actions(message: Json) -> list[Json] | None:
    """The commands of a reply; None when it calls no tool, or one of its calls is no call of bash."""
    calls: list[Json] = message.get("tool_calls") or []
    actions: list[Json] = []
    for call in calls:
        function: Json = call.get("function") or {}
        try:
            arguments: Any = json.loads(function.get("arguments") or "")
        except (ValueError, RecursionError):
            return None
        command: Any = cast(Json, arguments).get("command") if isinstance(arguments, dict) else None
        if function.get("name") != "bash" or not isinstance(command, str) or "\0" in command:
            return None
        actions.append({"command": command})
    return actions or None
