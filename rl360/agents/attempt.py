"""One life of one attempt, from the queue to its terminal outcome. Exactly one outcome comes out of it (S16).

queue -> setup (session and sandbox) -> agent -> everything of the agent's is killed -> collect (the session is closed,
so its turns are complete) -> verify. Every phase has its own clock (S15) and publishes when it ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from rl360.agents.clocks import PhaseClock, budget
from rl360.agents.harness.base import Assignment, Harness
from rl360.agents.outcomes import PHASE_BOUNDARY, InfraError, Teardown, boundary, timed_out, typed
from rl360.agents.sandbox.base import Sandbox
from rl360.agents.session import Sessions
from rl360.agents.staging import Staged
from rl360.agents.tasks import Task
from rl360.agents.verify import Verdict, verify
from rl360.bus import tracing
from rl360.bus.events import (
    AgentEnd,
    Boundary,
    Cause,
    Event,
    InfraFailed,
    Phase,
    RolloutAdmitted,
    RolloutPhase,
    VerifierResult,
    session_id,
)
from rl360.config import Agent

T = TypeVar("T")
Outcome = VerifierResult | InfraFailed

CANCEL_SECONDS: Final = 15.0
"""An agent whose clock ran out, and whose processes are dead, has this long to return."""

_COURTESY_SECONDS: Final = 5.0
_STOPPING_SECONDS: Final = 1.0
"""How long a session that didn't get to its collect phase is tried to be closed; nothing hangs on it."""


@dataclass(frozen=True, kw_only=True)
class Shop:
    """What a runner lends to each of its attempts. `sandbox_of` makes a sandbox, unstarted, for a session."""

    run: str
    node: str
    image: str
    config: Agent
    up: float  # when the run was last started, unix seconds
    sessions: Sessions
    find_task: Callable[[str, str], tuple[Task, Staged]]
    sandbox_of: Callable[[RolloutAdmitted, str, Task, Staged, float], Sandbox]
    harness_of: Callable[[Assignment], Harness]
    scratch: Path
    pool: Executor
    announce: Callable[[Event], Awaitable[None]]  # without waiting for a receipt: phases are news, not outcomes
    claim: Callable[[Event], Awaitable[bool]]  # record it; False: the journal holds another's


class Taken(Exception):
    """This life is another runner's: it was given out twice."""


class Attempt:
    """One life. `run` gives the terminal outcome; it is cancelled only when the runner must stop."""

    def __init__(self, shop: Shop, admitted: RolloutAdmitted, life: int) -> None:
        self._shop, self._admitted = shop, admitted
        self._session_id = session_id(admitted.attempt, life)
        self._clock = PhaseClock.taken(admitted.budgets, admitted=admitted.admitted, up=shop.up, now=time.time(), life=life)
        self._teardown = Teardown()
        self._open = False
        self._sandbox: Sandbox | None = None
        self._agent_end: AgentEnd | None = None
        self._courtesy = _COURTESY_SECONDS
        self._blocked: set[asyncio.Future[Any]] = set()

    async def run(self) -> Outcome:
        """The outcome, after everything of the attempt is taken down. Raises Taken, before anything is done."""
        try:
            outcome: Verdict | InfraError = await self._phases()
        except asyncio.CancelledError:
            self._courtesy = _STOPPING_SECONDS
            raise
        except Taken:
            raise
        except InfraError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  (an outcome all the same: counted as unknown, never lost, never a 0)
            outcome = typed(PHASE_BOUNDARY[self._clock.phase], error)
        finally:
            await asyncio.shield(self._take_down())
        return self._verified(outcome) if isinstance(outcome, Verdict) else self._failed(outcome)

    async def _phases(self) -> Verdict:
        if self._clock.ran_out(time.time()):
            raise timed_out(Phase.QUEUE, self._admitted.budgets.queue)
        if not await self._shop.claim(self._phase(time.time())):
            raise Taken
        given = await self._setup()
        self._agent_end = await self._agent(given)
        await self._kill()
        await self._ended()
        await self._collect()
        self._enter(Phase.VERIFY)
        verdict = await self._in_thread(
            lambda: verify(given.sandbox, given.task, given.staged, started=time.time(), timeout=self._left()), Boundary.VERIFIER
        )
        await self._ended()
        return verdict

    # ------------------------------------------------------------------------------------------------ phases

    async def _setup(self) -> Assignment:
        self._enter(Phase.SETUP)
        task, staged = await self._in_thread(lambda: self._shop.find_task(self._admitted.task, self._admitted.digest), Boundary.SANDBOX)
        session = await self._shop.sessions.open(self._admitted, self._session_id, deadline=self._clock.deadline)
        self._open = True
        self._sandbox = sandbox = self._shop.sandbox_of(self._admitted, self._session_id, task, staged, self._left())
        await self._in_thread(sandbox.start, Boundary.SANDBOX)
        await self._ended()
        self._enter(Phase.AGENT)
        return Assignment(
            task=task,
            staged=staged,
            sandbox=sandbox,
            config=self._shop.config,
            session=session.session,
            base_url=session.base_url,
            key=session.key,
            deadline=self._clock.deadline,
            traceparent=tracing.traceparent(self._shop.run, self._admitted.attempt, f"phase/{Phase.AGENT}"),
            scratch=self._shop.scratch,
        )

    async def _agent(self, given: Assignment) -> AgentEnd:
        """Run the agent to its end or to the end of its clock, which is the policy's doing and no failure (S14)."""
        await self._began()
        with boundary(Boundary.AGENT):
            harness = self._shop.harness_of(given)
        running = self._submit(harness.run)
        try:
            await asyncio.wait({running}, timeout=self._left())
            if not running.done():
                harness.cancel()
                await self._kill()
                await asyncio.wait({running}, timeout=CANCEL_SECONDS)
        except asyncio.CancelledError:
            harness.cancel()
            raise
        if not running.done():
            raise InfraError(Boundary.AGENT, Cause.LOST, f"the agent did not return {CANCEL_SECONDS:g} s after its clock ran out")
        with boundary(Boundary.AGENT):
            try:
                return running.result()
            except InfraError as e:
                if (e.boundary, e.cause) == (Boundary.SANDBOX, Cause.OUT_OF_MEMORY):
                    return AgentEnd.ERROR  # its own commands used up its memory: the verifier judges what is there (S14)
                raise

    async def _collect(self) -> None:
        self._enter(Phase.COLLECT)
        self._open = False
        try:
            await self._shop.sessions.close(self._session_id, str(self._agent_end), deadline=self._clock.deadline)
        except InfraError as e:
            raise InfraError(Boundary.COLLECT, e.cause, e.detail, exception=e.exception) from e
        await self._ended()

    async def _kill(self) -> None:
        if self._sandbox is not None:
            await self._in_thread(self._sandbox.kill_all, Boundary.SANDBOX)

    async def _take_down(self) -> None:
        """Kill, close and remove, whatever state things are in; what fails is noted beside the outcome."""
        if self._sandbox is not None:
            with self._teardown.step("sandbox"):
                await self._in_thread(self._sandbox.abort, Boundary.SANDBOX)
            if self._blocked:  # a start or a command that was under way: it ends by the abort, and before the removal
                await asyncio.wait(tuple(self._blocked), timeout=CANCEL_SECONDS)
            with self._teardown.step("sandbox"):
                await self._in_thread(self._sandbox.close, Boundary.SANDBOX)
        if self._open:
            with self._teardown.step("session"):
                await self._shop.sessions.close(self._session_id, "abandoned", deadline=time.time() + self._courtesy)

    # ------------------------------------------------------------------------------------------------ clock and threads

    def _enter(self, phase: Phase) -> None:
        self._clock = self._clock.enter(phase, time.time())

    def _left(self) -> float:
        return self._clock.left(time.time())

    async def _began(self) -> None:
        await self._shop.announce(self._phase(None))

    async def _ended(self) -> None:
        await self._shop.announce(self._phase(time.time()))

    def _phase(self, end: float | None) -> RolloutPhase:
        return RolloutPhase(
            run=self._shop.run,
            step=self._admitted.step,
            attempt=self._admitted.attempt,
            group=self._admitted.group,
            session=self._session_id,
            phase=self._clock.phase,
            start=self._clock.started,
            end=end,
            node=self._shop.node,
        )

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        future = asyncio.get_running_loop().run_in_executor(self._shop.pool, work)
        self._blocked.add(future)
        future.add_done_callback(self._unblocked)
        return future

    def _unblocked(self, future: asyncio.Future[Any]) -> None:
        self._blocked.discard(future)
        if not future.cancelled():
            future.exception()  # where nobody waits any more, it is of no interest

    async def _in_thread(self, work: Callable[[], T], where: Boundary) -> T:
        """Run blocking work; a cancelled caller leaves it running, and `_take_down` ends it by killing the sandbox."""
        with boundary(where):
            return await asyncio.shield(self._submit(work))

    # ------------------------------------------------------------------------------------------------ outcomes

    def _verified(self, verdict: Verdict) -> VerifierResult:
        assert self._agent_end is not None
        return VerifierResult(
            run=self._shop.run,
            step=self._admitted.step,
            attempt=self._admitted.attempt,
            group=self._admitted.group,
            session=self._session_id,
            reward=verdict.reward,
            low=verdict.low,
            high=verdict.high,
            receipt=verdict.receipt,
            exit_status=verdict.receipt.exit_status,
            agent_end=self._agent_end,
            node=self._shop.node,
            teardown_error=self._teardown.errors,
        )

    def _failed(self, error: InfraError) -> InfraFailed:
        phase = self._clock.ran_out(time.time())
        late = "" if phase is None else f" (after the {phase} phase's {budget(self._admitted.budgets, phase):g} s)"
        return InfraFailed(
            run=self._shop.run,
            step=self._admitted.step,
            attempt=self._admitted.attempt,
            group=self._admitted.group,
            session=self._session_id,
            boundary=error.boundary,
            cause=error.cause,
            exception=error.exception,
            detail=error.detail + late,
            node=self._shop.node,
            image=self._shop.image,
            agent_end=self._agent_end,
            teardown_error=self._teardown.errors,
        )
