"""An agent of Harbor's (terminus-2) on one attempt: Harbor's trial in a child with Harbor's Python, everything else ours.

The child has no sandbox: each command of the trial's comes back and runs in the attempt's own. It has no key: it talks to
a relay. It runs no verifier. So the sandbox's limits and leases, the kill before the verifier, receipts and clocks hold as
for every agent (S12-S17), and of Harbor's result only the agent's end is read (`harbor_result.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from aiohttp import web

from rl360.agents.harness.base import PROBE_SECONDS, Assignment
from rl360.agents.harness.harbor_nursery import Nursery
from rl360.agents.harness.harbor_result import agent_end
from rl360.agents.harness.relay import Relay
from rl360.agents.outcomes import InfraError, typed
from rl360.bus.events import AgentEnd, Boundary, Cause

_ENDS: Final = {"length": AgentEnd.LENGTH, "context": AgentEnd.CONTEXT, "turns": AgentEnd.TURNS}
_GRACE: Final = 30
"""Seconds after the agent's deadline at which a child ends by itself."""
_LINE: Final = 8 << 20
_TAIL: Final = 600
_TASK: Final = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n'


class HarborTrial:
    """Harbor's agent on one attempt."""

    def __init__(self, given: Assignment, nursery: Nursery) -> None:
        self._given, self._nursery = given, nursery
        self._folder = given.scratch / "harbor" / f"{given.session}-{secrets.token_hex(4)}"
        self._cancelled = False
        self._child: socket.socket | None = None
        self._fault: InfraError | None = None

    def run(self) -> AgentEnd:
        try:
            return asyncio.run(self._run())
        except InfraError as e:
            if self._cancelled and e.cause is Cause.CANCELLED:
                return AgentEnd.TIMEOUT
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def cancel(self) -> None:
        self._cancelled = True
        child = self._child
        if child is not None:
            with suppress(OSError):
                child.shutdown(socket.SHUT_RDWR)  # the child dies of it, and `run` ends

    async def _run(self) -> AgentEnd:
        task = await asyncio.to_thread(self._lay_out)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with _Door(self._given, listener) as door:
                await self._trial(door, task)
                return await self._end(door)

    async def _trial(self, door: _Door, task: Path) -> None:
        """Order a trial and serve its commands until the child is gone or the session takes no further turn."""
        self._child = child = await asyncio.to_thread(self._nursery.child)
        if self._cancelled:
            child.close()
            return
        reader, writer = await asyncio.open_connection(sock=child, limit=_LINE)
        try:
            writer.write(msgspec.json.encode(self._order(door, task)) + b"\n")
            serving = asyncio.create_task(self._serve(reader, writer))
            over = asyncio.create_task(door.over.wait())
            await asyncio.wait({serving, over}, return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
            serving.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await serving
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.TaskGroup() as commands:
            while self._fault is None and (line := await reader.readline()):
                commands.create_task(self._command(msgspec.json.decode(line), writer))

    async def _command(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Run one command in the sandbox. A sandbox that fails ends the trial: what Harbor would make of it is of no interest."""
        given = self._given
        left = max(0.0, given.deadline - time.time())
        seconds = min(float(asked["timeout"] or left), left)
        env = {**given.env, "TMUX_TMPDIR": self._root, **self._solution_env, **cast(dict[str, str], asked["env"])}
        try:
            result = await asyncio.to_thread(given.sandbox.exec, asked["command"], seconds, env)
        except Exception as e:  # noqa: BLE001  (typed, and raised by `_end`)
            self._fault = self._fault or typed(Boundary.SANDBOX, e)
            writer.close()
            return
        answer = {"id": asked["id"], "status": result.status, "output": result.output, "timed_out": result.timed_out}
        writer.write(msgspec.json.encode(answer) + b"\n")

    async def _end(self, door: _Door) -> AgentEnd:
        """First what is known here, then what Harbor says."""
        if self._fault is not None:
            raise self._fault
        if door.ended:
            return _ENDS.get(door.ended, AgentEnd.ERROR)
        if self._cancelled or time.time() >= self._given.deadline:
            return AgentEnd.TIMEOUT
        if fault := door.fault or door.refused:
            raise fault
        end = await asyncio.to_thread(self._said)
        if end is AgentEnd.ERROR and (await asyncio.to_thread(self._given.sandbox.exec, "true", PROBE_SECONDS)).timed_out:
            raise InfraError(Boundary.SANDBOX, Cause.LOST, f"the sandbox hangs: `true` did not end in {PROBE_SECONDS:g} s")
        return end

    def _said(self) -> AgentEnd:
        result = self._folder / "trials" / "trial" / "result.json"
        if not result.is_file():
            log = self._folder / "log"
            said = log.read_text(errors="replace")[-_TAIL:].strip() if log.is_file() else self._nursery.said()
            raise InfraError(Boundary.AGENT, Cause.LOST, f"Harbor's child died without a result; it said: {said or 'nothing'}")
        return agent_end(result.read_bytes())

    def _order(self, door: _Door, task: Path) -> dict[str, Any]:
        given, asked = self._given, self._given.config.harbor
        return {
            "agent": asked.agent,
            "args": asked.args,
            "model": f"openai/{given.request['model']}",
            "env": {"OPENAI_API_KEY": door.key, "OPENAI_BASE_URL": door.url, "OPENAI_API_BASE": door.url},
            "task": str(task),
            "trials": str(self._folder / "trials"),
            "log": str(self._folder / "log"),
            "root": self._root,
            "seconds": max(1, round(given.deadline - time.time()) + _GRACE),
        }

    @property
    def _oracle(self) -> bool:
        return self._given.config.harbor.agent == "oracle"

    @property
    def _solution_env(self) -> Mapping[str, str]:
        return self._given.task.solution_env if self._oracle else {}

    @property
    def _root(self) -> str:
        """Where Harbor's logs lie in the sandbox."""
        return f"/tmp/harbor-{self._given.session}"

    def _lay_out(self) -> Path:
        """The task as Harbor needs it: the instruction, and the solution for its oracle. It hashes what is there, each time."""
        task = self._folder / "task"
        (task / "environment").mkdir(parents=True)
        (task / "task.toml").write_text(_TASK)
        (task / "tests").mkdir()
        (task / "tests" / "test.sh").write_text("exit 1\n")  # Harbor wants one, and never runs it
        (task / "instruction.md").write_text(self._given.task.instruction)
        if self._oracle and self._given.staged.solution is not None:
            shutil.copytree(self._given.staged.solution, task / "solution")
        return task


class _Door(Relay):
    """A relay on the host's loopback: it takes a key of its own, which is worth nothing elsewhere. `over`: no turn comes any more."""

    def __init__(self, given: Assignment, listener: socket.socket) -> None:
        super().__init__(given, listener)
        self.key = secrets.token_hex(16)
        self.over = asyncio.Event()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized(text="not the key of this attempt")
        try:
            return await super()._serve(request)
        finally:
            if self.ended or self.refused:  # Harbor's agents would ask for the same thing again, with growing pauses
                self.over.set()
