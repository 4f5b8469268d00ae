"""One life of one attempt, from the queue to its terminal outcome. Exactly one outcome comes out of it (S16).

queue -> setup (session and sandbox) -> agent -> everything of the agent's is killed -> collect (the session is closed,
so its turns are complete) -> verify. Every phase has its own clock (S15) and publishes when it ended. A task of several
steps goes through setup, agent and verify once a step; the steps share each phase's budget, and the phase is told once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from rl360.agents.admission import Seat
from rl360.agents.artifacts import collect
from rl360.agents.attempt_events import Speaker
from rl360.agents.clocks import PhaseClock
from rl360.agents.harness.base import Assignment
from rl360.agents.judge import judge
from rl360.agents.outcomes import PHASE_BOUNDARY, InfraError, Teardown, boundary, timed_out, typed
from rl360.agents.ready import make_ready
from rl360.agents.sandbox.base import Sandbox
from rl360.agents.shop import Shop
from rl360.agents.staging import Staged
from rl360.agents.steps import Walk
from rl360.agents.tasks import Task
from rl360.agents.verify import Verdict
from rl360.bus import tracing
from rl360.bus.events import (
    AgentEnd,
    Boundary,
    Cause,
    InfraFailed,
    Phase,
    RolloutAdmitted,
    VerifierResult,
    session_id,
)
from rl360.sessions.client import OpenedSession

T = TypeVar("T")
Outcome = VerifierResult | InfraFailed

CANCEL_SECONDS: Final = 15.0
"""An agent whose clock ran out, and whose processes are dead, has this long to return."""

_PASSING: Final = frozenset({Cause.START_FAILED, Cause.LOST, Cause.REFUSED})
"""Causes of a start's failure that may be gone when it is tried again."""

_COURTESY_SECONDS: Final = 5.0
_STOPPING_SECONDS: Final = 1.0
"""How long a session that didn't get to its collect phase is tried to be closed; nothing hangs on it."""


class Taken(Exception):
    """This life is another runner's: it was given out twice."""


class Attempt:
    """One life. `run` gives the terminal outcome; it is cancelled only when the runner must stop."""

    def __init__(self, shop: Shop, admitted: RolloutAdmitted, life: int) -> None:
        self._shop, self._admitted = shop, admitted
        self._session_id = session_id(admitted.attempt, life)
        self._says = Speaker(run=shop.run, admitted=admitted, session=self._session_id, node=shop.node)
        self._clock = PhaseClock.taken(admitted.budgets, admitted=admitted.admitted, up=shop.up, now=time.time(), life=life)
        self._teardown = Teardown()
        self._open = False
        self._used = dict.fromkeys(Phase, 0.0)  # of each phase's budget, by the steps before
        self._sandboxes: list[Sandbox] = []  # the agent's last
        self._made = 0
        self._seat: Seat | None = None
        self._walk: Walk | None = None
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
        if isinstance(outcome, Verdict):
            assert self._agent_end is not None
            return self._says.verified(outcome, self._agent_end, self._teardown.errors)
        image, end, teardown = self._shop.image, self._agent_end, self._teardown.errors
        return self._says.failed(outcome, self._clock, time.time(), image=image, agent_end=end, teardown_error=teardown)

    async def _phases(self) -> Verdict:
        if self._clock.ran_out(time.time()):
            raise timed_out(Phase.QUEUE, self._admitted.budgets.queue)
        task, staged = await self._in_thread(lambda: self._shop.find_task(self._admitted.task, self._admitted.digest), Boundary.SANDBOX)
        await self._take_seat(task, staged)
        if not await self._shop.claim(self._says.phase(self._clock, time.time())):
            raise Taken
        self._enter(Phase.SETUP)
        session = await self._shop.sessions.open(self._admitted, self._session_id, deadline=self._clock.deadline)
        self._open = True
        self._walk = walk = Walk(task, staged, self._shop.scratch / "steps" / self._session_id)
        while await self._step(walk, session, staged):
            self._enter(Phase.SETUP)
        if self._open:  # a step's reward ended the task before its last step
            await self._collect()
        return walk.verdict()

    # ------------------------------------------------------------------------------------------------ phases

    async def _take_seat(self, task: Task, staged: Staged, due: float = 0.0) -> None:
        """Wait for room on the node, as long as the clock of the phase allows. Raises InfraError (queue/timeout, sandbox/bad_task)."""
        self._seat = await self._shop.admission.enter(self._shop.start_of(self._session_id, task, staged, due), self._clock.deadline)

    async def _step(self, walk: Walk, session: OpenedSession, original: Staged) -> bool:
        """One step from setup to verdict; whether another follows. A task without steps is one."""
        given = await self._setup(walk, session)
        self._agent_end = await self._agent(given, first=walk.number == 0)
        await self._kill()
        if walk.last:
            await self._ended()
            await self._collect()
        await self._keep(walk, given)
        self._enter(Phase.VERIFY)
        sandbox, task, staged, timeout = given.sandbox, given.task, given.staged, self._left()
        verdict = await self._in_thread(lambda: judge(sandbox, task, staged, original, timeout, self._sandbox), Boundary.VERIFIER)
        if walk.last:
            await self._ended()
        return walk.judged(verdict)

    async def _setup(self, walk: Walk, session: OpenedSession) -> Assignment:
        await self._close_sandboxes()
        task, staged = await self._in_thread(walk.current, Boundary.SANDBOX)
        sandbox = await self._start(task, staged)
        await self._in_thread(lambda: make_ready(sandbox, task, staged, self._left()), Boundary.SANDBOX)
        if walk.number == 0:
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
            deadline=min(self._clock.deadline, time.time() + (task.agent_timeout or math.inf)),
            traceparent=tracing.traceparent(self._shop.run, self._admitted.attempt, f"phase/{Phase.AGENT}"),
            scratch=self._shop.scratch,
        )

    async def _start(self, task: Task, staged: Staged) -> Sandbox:
        """A started sandbox. What may pass is tried again, through the same door; when it doesn't, the first failure is the one told."""
        first: InfraError | None = None
        tries = 0
        while True:
            sandbox = self._sandbox(task, staged)
            try:
                await self._in_thread(sandbox.start, Boundary.SANDBOX)
            except InfraError as error:
                tries += 1
                first = first or error
                due = self._shop.retry_at(tries) if error.cause in _PASSING else None
                if due is None or due >= self._clock.deadline:
                    raise first from error
                await self._shop.announce(self._says.retried(error, tries, due))
                await self._wait_again(task, staged, due, first)
            else:
                assert self._seat is not None
                self._seat.started(ok=True)
                return sandbox

    async def _wait_again(self, task: Task, staged: Staged, due: float, first: InfraError) -> None:
        """Give the seat of a start that failed back, once nothing of it is left, and wait for another one."""
        try:
            await self._close_sandboxes()
            self._leave_seat()
            await self._take_seat(task, staged, due)
        except InfraError as late:
            raise first from late

    def _leave_seat(self) -> None:
        if self._seat is not None:
            self._seat.leave()

    async def _agent(self, given: Assignment, *, first: bool) -> AgentEnd:
        """Run the agent to its end or to the end of its clock, which is the policy's doing and no failure (S14)."""
        if first:
            await self._began()
        with boundary(Boundary.AGENT):
            harness = self._shop.harness_of(given)
        running = self._submit(harness.run)
        try:
            await asyncio.wait({running}, timeout=max(0.0, given.deadline - time.time()))
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

    async def _keep(self, walk: Walk, given: Assignment) -> None:
        """Keep what the task wants kept, and the workdir for the next step. The agent is dead."""
        workdir, task = given.sandbox.workdir, given.task
        if task.artifacts:
            folder = self._shop.artifacts / self._session_id / task.step
            await self._in_thread(lambda: collect(workdir, task, folder), Boundary.COLLECT)
        await self._in_thread(lambda: walk.leave(workdir), Boundary.COLLECT)

    def _sandbox(self, task: Task, staged: Staged) -> Sandbox:
        """A further sandbox of this life, unstarted; it is closed with the life at the latest."""
        name = self._session_id + (f"-{self._made}" if self._made else "")
        self._made += 1
        sandbox = self._shop.sandbox_of(self._admitted, name, task, staged, self._left())
        self._sandboxes.append(sandbox)
        return sandbox

    async def _kill(self) -> None:
        for sandbox in tuple(self._sandboxes):
            await self._in_thread(sandbox.kill_all, Boundary.SANDBOX)

    async def _close_sandboxes(self) -> None:
        """Those of the step before. Each leaves the list only once it is gone."""
        while self._sandboxes:
            await self._in_thread(self._sandboxes[0].close, Boundary.SANDBOX)
            del self._sandboxes[0]

    async def _take_down(self) -> None:
        """Kill, close and remove, whatever state things are in; what fails is noted beside the outcome."""
        for sandbox in tuple(self._sandboxes):
            with self._teardown.step("sandbox"):
                await self._in_thread(sandbox.abort, Boundary.SANDBOX)
        if self._blocked:  # a start or a command that was under way: it ends by the abort, and before the removal
            await asyncio.wait(tuple(self._blocked), timeout=CANCEL_SECONDS)
        for sandbox in tuple(self._sandboxes):
            with self._teardown.step("sandbox"):
                await self._in_thread(sandbox.close, Boundary.SANDBOX)
        self._leave_seat()
        if self._walk is not None:
            await self._in_thread(self._walk.close, Boundary.SANDBOX)
        if self._open:
            with self._teardown.step("session"):
                await self._shop.sessions.close(self._session_id, "abandoned", deadline=time.time() + self._courtesy)

    # ------------------------------------------------------------------------------------------------ clock and threads

    def _enter(self, phase: Phase) -> None:
        now = time.time()
        self._used[self._clock.phase] += now - self._clock.started
        self._clock = self._clock.enter(phase, now, self._used[phase])

    def _left(self) -> float:
        return self._clock.left(time.time())

    async def _began(self) -> None:
        await self._shop.announce(self._says.phase(self._clock, None))

    async def _ended(self) -> None:
        await self._shop.announce(self._says.phase(self._clock, time.time()))

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
