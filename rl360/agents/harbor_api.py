"""`POST /run`, `POST /flush`, `GET /health`: the agent server that Miles' agent functions call, over RL360's sandboxes and verifiers.

One /run is one attempt: `{instance_id, base_url, model, sampling_params, …}` to `{reward, exit_status, eval_report, agent_metrics}`.
`reward` is null when no verifier wrote one, with the typed cause in `exit_status` and `eval_report`: never 0 (S12, S13).
/flush cancels the runs of one `session_server_instance_id`, or all. A client that goes away cancels its run.

Not covered: `max_seq_len`, which the session server keeps; `agent_name`, since the recipe chooses the agent (a different one is refused).
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from rl360.agents.harness.base import Harness
from rl360.agents.outcomes import InfraError, boundary
from rl360.agents.play import Endpoint, HarnessOf, run_agent
from rl360.agents.playground import Place, Playground
from rl360.agents.sandbox.base import Sandbox
from rl360.agents.tasks import Task
from rl360.agents.verify import Verdict
from rl360.bus.events import AgentEnd, Boundary, Cause

MAX_BODY: Final = 1 << 20
FLUSHED: Final = "flushed"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /run. What else it holds is the caller's own metadata. `base_url` ends in /v1."""

    instance_id: str
    base_url: Annotated[str, Meta(pattern="^https?://[^/]")]
    model: str = "policy"
    sampling_params: dict[str, Any] = {}
    agent_name: str = ""
    api_key: str = ""
    session_server_instance_id: str = ""


class Flush(msgspec.Struct, frozen=True, kw_only=True):
    session_server_instance_id: str = ""


@dataclass
class Run:
    """One attempt under way, and what it takes to end it from another thread."""

    name: str
    task: Task
    asked: Asked
    cancelled: bool = False
    harness: Harness | None = None
    sandbox: Sandbox | None = None
    end: AgentEnd | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def cancel(self) -> None:
        self.cancelled = True
        if self.harness is not None:
            self.harness.cancel()
        if self.sandbox is not None:
            with suppress(InfraError):  # the run's own teardown says what became of it
                self.sandbox.abort()


class HarborApi:
    """The service over a playground. `tasks` by name and by folder name; at most `slots` attempts at once, the others wait."""

    def __init__(self, tasks: dict[str, Task], ground: Playground, harness_of: HarnessOf, slots: int, admin: str = "") -> None:
        self._tasks, self._ground, self._harness_of, self._admin = tasks, ground, harness_of, admin
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix="attempt")
        self._futures: set[Future[dict[str, Any]]] = set()
        self._runs: dict[str, Run] = {}
        self._numbers = itertools.count()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes([web.post("/run", self._run), web.post("/flush", self._flush), web.get("/health", self._health)])
        app.on_cleanup.append(self._close)
        return app

    async def _run(self, request: web.Request) -> web.Response:
        asked = _decoded(await request.read(), Asked)
        task = self._tasks.get(asked.instance_id)
        if task is None:
            raise _refused(web.HTTPNotFound, f"no task {asked.instance_id!r} is served here; there are {len(self._tasks)}")
        agent = self._ground.config.agent.harness
        if asked.agent_name and asked.agent_name.replace("-", "_") not in (agent, f"{agent}_agent"):
            raise _refused(
                web.HTTPBadRequest, f"agent_name {asked.agent_name!r}: this server runs {agent!r}; leave it out or change agent.harness"
            )
        run = Run(f"{task.digest[:16]}-{next(self._numbers)}", task, asked)
        self._runs[run.name] = run
        future = self._pool.submit(self._attempt, run)
        self._futures.add(future)
        try:
            return web.json_response(await asyncio.wrap_future(future))
        except asyncio.CancelledError:
            await asyncio.to_thread(run.cancel)
            raise
        finally:
            self._runs.pop(run.name, None)
            self._futures.discard(future)

    async def _flush(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if self._admin and not hmac.compare_digest(given.encode(), f"Bearer {self._admin}".encode()):
            raise _refused(web.HTTPUnauthorized, "/flush needs the server's admin key")
        body = await request.read()
        which = _decoded(body, Flush).session_server_instance_id if body else ""
        chosen = [run for run in self._runs.values() if which in ("", run.asked.session_server_instance_id)]
        for run in chosen:
            await asyncio.to_thread(run.cancel)
        return web.json_response({"cancelled": len(chosen)})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "tasks": len({t.digest for t in self._tasks.values()}), "running": len(self._runs)})

    async def _close(self, _: web.Application) -> None:
        for run in tuple(self._runs.values()):
            run.cancelled = True
        await asyncio.to_thread(self._ground.stop, self._pool, tuple(self._futures))

    # ------------------------------------------------------------------------------------------------ one attempt, in a thread

    def _attempt(self, run: Run) -> dict[str, Any]:
        began = time.monotonic()
        try:
            if run.cancelled:
                raise InfraError(Boundary.QUEUE, Cause.CANCELLED, FLUSHED)
            with boundary(Boundary.AGENT):
                verdict = self._ground.play(run.task, run.name, lambda place: self._act(place, run))
        except InfraError as e:
            return _failed(run, e, time.monotonic() - began)
        return _verified(run, verdict, time.monotonic() - began)

    def _act(self, place: Place, run: Run) -> None:
        run.sandbox = place.sandbox
        if run.cancelled:
            raise InfraError(Boundary.AGENT, Cause.CANCELLED, FLUSHED)
        began = time.monotonic()
        model = run.asked.model.removeprefix("openai/")
        endpoint = Endpoint(url=run.asked.base_url, key=run.asked.api_key, request={**run.asked.sampling_params, "model": model})

        def told(harness: Harness) -> None:
            run.harness = harness
            if run.cancelled:
                harness.cancel()

        try:
            run.end = run_agent(place, run.name, endpoint, self._ground.config.agent, self._harness_of, self._ground.scratch, told)
        finally:
            run.seconds["agent"] = run.seconds.get("agent", 0.0) + time.monotonic() - began


def _verified(run: Run, verdict: Verdict, seconds: float) -> dict[str, Any]:
    if run.cancelled:
        return _failed(run, InfraError(Boundary.AGENT, Cause.CANCELLED, FLUSHED), seconds)
    report: dict[str, Any] = {"low": verdict.low, "high": verdict.high, "receipt": verdict.receipt, "steps": verdict.steps}
    return _reply(run, verdict.reward, str(run.end), report, seconds)


def _failed(run: Run, error: InfraError, seconds: float) -> dict[str, Any]:
    report = {"boundary": error.boundary.value, "cause": error.cause.value, "exception": error.exception, "detail": error.detail}
    return _reply(run, None, f"infra/{error.boundary.value}/{error.cause.value}", report, seconds)


def _reply(run: Run, reward: float | None, status: str, report: dict[str, Any], seconds: float) -> dict[str, Any]:
    timed = {f"{phase}_seconds": round(took, 3) for phase, took in {**run.seconds, "total": seconds}.items()}
    facts = {"task": run.task.name, "digest": run.task.digest, "agent_end": run.end}
    return msgspec.to_builtins({"reward": reward, "exit_status": status, "eval_report": {**facts, **report}, "agent_metrics": timed})


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise _refused(web.HTTPBadRequest, f"the body is not what this route takes: {e}") from None


def _refused(kind: type[web.HTTPException], why: str) -> web.HTTPException:
    return kind(text=msgspec.json.encode({"error": why}).decode(), content_type="application/json")
