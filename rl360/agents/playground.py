"""Tasks played outside of a run: no bus, no session server. The same sandboxes, steps, clocks and verifiers as a runner's.

For what is done to tasks before they are trained on: qualifying and calibrating them.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from rl360.agents.judge import judge
from rl360.agents.outcomes import InfraError, Teardown
from rl360.agents.ready import make_ready
from rl360.agents.sandbox.base import Sandbox
from rl360.agents.sandbox.leases import Lease
from rl360.agents.sandbox.make import SandboxMaker
from rl360.agents.staging import Stage, Staged
from rl360.agents.steps import Walk
from rl360.agents.tasks import Task
from rl360.agents.verify import Verdict
from rl360.bus.events import Boundary, Cause
from rl360.config import Config

WORKERS: Final = 4
_ABORT_AGAIN: Final = 0.2  # seconds; a thread may just have been making a sandbox
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Place:
    """A step of a task in its started sandbox, with the seconds that whoever acts in it has."""

    task: Task
    staged: Staged
    sandbox: Sandbox
    seconds: float
    ends: set[Callable[[], object]]  # what to call, from any thread, when all must stop; who acts adds and takes away its own


@dataclass(frozen=True)
class Playground:
    """Sandboxes of one lease. Safe for many threads."""

    maker: SandboxMaker
    stage: Stage
    config: Config
    scratch: Path
    ends: set[Callable[[], object]]
    numbers: Iterator[int]
    stopping: threading.Event

    def each(self, given: Iterable[T], work: Callable[[T], R], took: Callable[[R], None], workers: int = WORKERS) -> None:
        """Run `work` on each in threads and hand results over in this one, as they come in. A failure, or Ctrl-C, stops it
        all: nothing else begins, sandboxes are killed, and every thread has ended when the exception leaves."""
        pool = ThreadPoolExecutor(workers)
        pending = {pool.submit(work, one) for one in given}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    took(future.result())
        except BaseException:
            self.stop(pool, pending)
            raise
        finally:
            pool.shutdown()

    def stop(self, pool: ThreadPoolExecutor, pending: Iterable[Future[Any]]) -> None:
        """Kill what runs, and wait until all of `pool` has ended. Nothing can be played after it."""
        self.stopping.set()
        pool.shutdown(wait=False, cancel_futures=True)
        while left := [future for future in pending if not future.done()]:
            self._abort()
            wait(left, timeout=_ABORT_AGAIN)
        pool.shutdown()

    def _abort(self) -> None:
        teardown = Teardown()
        for end in tuple(self.ends):
            with teardown.step("stopping"):
                end()

    def play(self, task: Task, name: str, act: Callable[[Place], None], *, see_solution: bool = False) -> Verdict:
        """Let `act` do something in each step's sandbox, then kill it and run the verifier. Raises InfraError without a reward."""
        original, budgets = self.stage.get(task), task.budgets(self.config.budgets)
        walk = Walk(task, original, self.scratch / name)
        made: list[Sandbox] = []

        def make(part: Task, staged: Staged, seen: dict[str, Path] | None = None) -> Sandbox:
            if self.stopping.is_set():
                raise InfraError(Boundary.SANDBOX, Cause.CANCELLED, "interrupted")
            made.append(self.maker.make(f"{name}-{len(made)}", next(self.numbers), part, staged, budgets.setup, seen))
            self.ends.add(made[-1].abort)
            return made[-1]

        try:
            while True:
                part, staged = walk.current()
                seen = {"/solution": staged.solution} if see_solution and staged.solution else {}
                sandbox = make(part, staged, seen)
                sandbox.start()
                make_ready(sandbox, part, staged, budgets.setup)
                act(Place(part, staged, sandbox, min(budgets.agent, part.agent_timeout or budgets.agent), self.ends))
                sandbox.kill_all()
                walk.leave(sandbox.workdir)
                if not walk.judged(judge(sandbox, part, staged, original, budgets.verify, make)):
                    return walk.verdict()
                self._close(made)
        finally:
            self._close(made)
            walk.close()

    def _close(self, made: list[Sandbox]) -> None:
        teardown = Teardown()
        for sandbox in made:
            with teardown.step("sandbox"):
                sandbox.close()
            self.ends.discard(sandbox.abort)


@contextmanager
def playground(sandboxes: Path, config: Config, what: str) -> Generator[Playground]:
    """A playground of one lease in the folder of leases `sandboxes`."""
    lease = Lease(sandboxes, f"{what}-{os.getpid()}-{time.time_ns():x}")
    try:
        maker = SandboxMaker(config.sandbox, lease, f"{config.run.name}-{what}")
        yield Playground(maker, Stage(lease.folder / "tasks"), config, lease.folder / "steps", set(), itertools.count(), threading.Event())
        maker.close()
    finally:
        lease.release()
