"""The worker that runs attempts: takes admitted rollouts from the shared consumer, publishes exactly one outcome each (S16).

A delivery is acknowledged only after its outcome is in the journal. When a runner dies, its attempts are delivered
again and start a new life in a fresh session; its sandboxes end with it, and the next runner sweeps what is left.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from rl360.agents import faults
from rl360.agents.admission import Admission
from rl360.agents.attempt import Attempt, Outcome, Taken
from rl360.agents.harness.base import Assignment, Harness
from rl360.agents.lives import Lives
from rl360.agents.outcomes import InfraError
from rl360.agents.placement import Need
from rl360.agents.sandbox.base import Limits, Sandbox
from rl360.agents.sandbox.faulty import FaultySandbox
from rl360.agents.sandbox.leases import Lease, sweep
from rl360.agents.sandbox.make import SandboxMaker
from rl360.agents.session import Sessions
from rl360.agents.shop import Shop
from rl360.agents.staging import Stage, Staged
from rl360.agents.tasks import Task, TaskError, TaskIndex
from rl360.agents.waves import Start, pull_share, retry_at
from rl360.bus.client import Delivery
from rl360.bus.connection import BusError
from rl360.bus.events import Boundary, Cause, Event, FaultInjected, InfraFailed, LimitNotEnforced, Purpose, RolloutAdmitted, session_id
from rl360.bus.publisher import PubAck
from rl360.bus.worker import WorkerContext
from rl360.config import Agent
from rl360.config import Sandbox as SandboxSection

DURABLE: Final = "runner"
ACK_WAIT: Final = 15.0
"""Seconds after which an attempt whose runner went silent is given to another."""
_BEAT: Final = ACK_WAIT / 4
_POLL: Final = 0.5
_SWEEP: Final = 15.0
_THREADS_A_SLOT: Final = 2  # one for the agent, one for what kills it
_FINISH_SHARE: Final = 1 / 3  # of the drain: attempts may finish; in the rest the others are taken down


async def main(ctx: WorkerContext) -> None:
    """Run attempts until `ctx.stop` is set, then give the unfinished ones back within `supervise.drain_seconds`."""
    root = ctx.dir / "sandboxes"
    await _sweep(ctx, root)
    lease = await asyncio.to_thread(Lease, root, f"{ctx.name}-{os.getpid()}-{time.time_ns():x}")
    pool = ThreadPoolExecutor(ctx.config.runners.slots * _THREADS_A_SLOT + 4, thread_name_prefix="attempt")
    sweeping = asyncio.create_task(_sweep_again(ctx, root))
    try:
        maker = await asyncio.to_thread(SandboxMaker, ctx.config.sandbox, lease, ctx.bus.run)
        async with Sessions(ctx.addresses.sessions, ctx.secrets.admin) as sessions:
            for limit, why in (await asyncio.to_thread(maker.unenforced)).items():
                await ctx.bus.publish(LimitNotEnforced(run=ctx.bus.run, node=_node(ctx), limit=limit, why=why))
            lives = await Lives.read(ctx.bus)
            await Runner(ctx, _shop(ctx, lease, maker, sessions, pool, lives.started), lives).run()
        await asyncio.to_thread(maker.close)
    finally:
        sweeping.cancel()
        pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(lease.release)
        await _sweep(ctx, root)


def _node(ctx: WorkerContext) -> str:
    return f"{socket.gethostname()}/{ctx.name}"


async def _sweep(ctx: WorkerContext, root: Path) -> None:
    try:
        for name in await asyncio.to_thread(sweep, root):
            ctx.log.warning("swept sandbox %s of a runner that died", name)
    except OSError as e:
        ctx.log.error("what dead runners left in %s could not be swept, and is tried again: %s", root, e)


async def _sweep_again(ctx: WorkerContext, root: Path) -> None:
    """A child that was just being started can hold a dead runner's lease for a moment, so one sweep is not enough."""
    while True:
        await asyncio.sleep(_SWEEP)
        await _sweep(ctx, root)


class Runner:
    """Takes deliveries, as many at once as there are slots."""

    def __init__(self, ctx: WorkerContext, shop: Shop, lives: Lives) -> None:
        self._ctx, self._shop, self._lives = ctx, shop, lives
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by attempt

    async def run(self) -> None:
        runners = self._ctx.config.runners
        share = self._ctx.bus.consume(
            DURABLE,
            [RolloutAdmitted],
            ack_wait=ACK_WAIT,
            max_deliver=self._ctx.config.agent.max_lives + 2,
            max_in_flight=max(1024, 4 * runners.count * runners.slots),
        )
        async with share:
            while not self._ctx.stop.is_set():
                if len(self._tasks) >= runners.slots:
                    await asyncio.wait(self._tasks.values(), timeout=_POLL, return_when=asyncio.FIRST_COMPLETED)
                elif delivery := await share.next(_POLL):
                    self._begin(delivery)
            await self._drain()

    def _begin(self, delivery: Delivery) -> None:
        admitted = delivery.recorded.event
        assert isinstance(admitted, RolloutAdmitted)
        if admitted.attempt in self._tasks:
            # Its beats were late. No second life beside the first: what acknowledges the first delivery ends this one too.
            self._ctx.log.warning("%s: delivered again while it goes on here", admitted.attempt)
            return
        task = self._tasks[admitted.attempt] = asyncio.create_task(self._take(admitted, delivery))
        task.add_done_callback(lambda _: self._tasks.pop(admitted.attempt))

    async def _drain(self) -> None:
        """Let attempts finish for a while, then cancel them: they are given back and start again elsewhere."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self._ctx.config.supervise.drain_seconds * _FINISH_SHARE)
        unfinished = tuple(self._tasks.values())
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=self._ctx.config.supervise.drain_seconds * (1 - _FINISH_SHARE))

    async def _take(self, admitted: RolloutAdmitted, delivery: Delivery) -> None:
        beats = asyncio.create_task(_beat(delivery))
        try:
            outcome = await self._outcome(admitted, delivery)
            if outcome is not None:
                await self._ctx.bus.publish(outcome)
            await delivery.ack()
        except asyncio.CancelledError:
            await delivery.nak(0.0)
            raise
        except Taken:
            # The server forgot in a restart that it gave it out. Once its runner beats again, that one keeps it.
            self._ctx.log.warning("%s: goes on elsewhere, given back for %g s", admitted.attempt, ACK_WAIT)
            await delivery.nak(ACK_WAIT)
        except BusError as e:
            # Not acknowledged: it is delivered again, and whoever gets it looks for the outcome first.
            self._ctx.log.error("%s: the outcome could not be recorded: %s", admitted.attempt, e)
        finally:
            beats.cancel()

    async def _outcome(self, admitted: RolloutAdmitted, delivery: Delivery) -> Outcome | None:
        """The outcome of this life; None when the journal has one already. A life's session is never one of an earlier life.

        Raises Taken for an attempt whose last life may go on elsewhere.
        """
        past = await self._lives.past(delivery)
        if past.over:
            return None
        if past.held(delivery.recorded.deliveries):
            raise Taken
        life = max(delivery.recorded.deliveries, past.lives + 1)
        if delivery.recorded.deliveries > self._ctx.config.agent.max_lives:
            return self._exhausted(admitted, life)
        return await Attempt(self._shop, admitted, life).run()

    def _exhausted(self, admitted: RolloutAdmitted, life: int) -> InfraFailed:
        """A poison attempt: its runner died (or gave it back) each time (CASES 12)."""
        lives = self._ctx.config.agent.max_lives
        return InfraFailed(
            run=self._ctx.bus.run,
            step=admitted.step,
            attempt=admitted.attempt,
            group=admitted.group,
            session=session_id(admitted.attempt, life),
            boundary=Boundary.QUEUE,
            cause=Cause.ATTEMPTS_EXHAUSTED,
            exception="AttemptsExhausted",
            detail=f"{lives} lives of this attempt ended without an outcome (agent.max_lives)",
            node=self._shop.node,
            image=self._shop.image,
        )


async def _beat(delivery: Delivery) -> None:
    while True:
        await asyncio.sleep(_BEAT)
        await delivery.beat()


def harness_maker(agent: Agent, scratch: Path) -> Callable[[Assignment], Harness]:
    """What makes the recipe's agent for an assignment. Imports only what that agent needs, once."""
    if agent.harness == "mini_swe":
        from rl360.agents.harness import mini_swe

        mini_swe.load(scratch)
        return mini_swe.MiniSwe
    if agent.harness == "openai_url":
        from rl360.agents.harness.openai_url import OpenAiUrl

        return OpenAiUrl
    if agent.harness == "harbor":
        from rl360.agents.harness.harbor_nursery import Nursery
        from rl360.agents.harness.harbor_trial import HarborTrial

        nursery = Nursery(agent.harbor, scratch / "harbor.log")
        return lambda given: HarborTrial(given, nursery)
    from rl360.agents.harness.scripted import Scripted

    return Scripted


def task_finder(index: TaskIndex, stage: Stage) -> Callable[[str, str], tuple[Task, Staged]]:
    """Finds a task by name and digest, and its staged copy. Raises InfraError (bad_task)."""

    def find(name: str, digest: str) -> tuple[Task, Staged]:
        try:
            task = index.find(name, digest)
            return task, stage.get(task)
        except TaskError as e:
            raise InfraError(Boundary.SANDBOX, Cause.BAD_TASK, str(e), exception=type(e).__name__) from e

    return find


def start_maker(section: SandboxSection, limits_of: Callable[[Task], Limits]) -> Callable[[str, Task, Staged, float], Start]:
    """What an attempt at a task needs of the node: what its limits allow, and the image that its container is made from."""

    def start_of(session: str, task: Task, staged: Staged, due: float) -> Start:
        limits = limits_of(task)
        apart = any(step.separate_verifier for step in (task, *task.steps))  # then two workdirs are there at once
        workdirs = 0 if section.kind == "docker" else limits.storage_mb * (1 + apart)
        return Start(id=session, need=Need.of(limits.memory_mb + workdirs, limits.cpus), image=_image(section, task, staged), due=due)

    return start_of


def _image(section: SandboxSection, task: Task, staged: Staged) -> str:
    """Pulled from a registry, or built from the task's folder; "": this kind of sandbox has none."""
    if section.kind != "docker":
        return ""
    return task.docker_image or (f"task:{task.digest}" if staged.image else section.image)


def _fault_maker(ctx: WorkerContext, loop: asyncio.AbstractEventLoop) -> Callable[[RolloutAdmitted, str, Task, Sandbox], Sandbox]:
    """Gives a sandbox back as it is, or with the fault that the recipe has for its attempt."""
    plan, seed = ctx.config.faults, ctx.config.run.seed

    def faulty(admitted: RolloutAdmitted, session: str, task: Task, sandbox: Sandbox) -> Sandbox:
        if admitted.purpose is not Purpose.TRAIN:
            return sandbox
        number = faults.of_attempt(plan, seed=seed, step=admitted.step, attempt=admitted.attempt, domain=task.domain)
        if number is None:
            return sandbox
        kind = plan[number].kind
        event = FaultInjected(
            run=ctx.bus.run, step=admitted.step, attempt=admitted.attempt, group=admitted.group, fault=number, kind=kind, target=session
        )
        return FaultySandbox(sandbox, kind, lambda: _wait_published(ctx, loop, event))

    return faulty


def _wait_published(ctx: WorkerContext, loop: asyncio.AbstractEventLoop, event: Event) -> None:
    asyncio.run_coroutine_threadsafe(ctx.bus.publish(event), loop).result()


def _shop(ctx: WorkerContext, lease: Lease, maker: SandboxMaker, sessions: Sessions, pool: ThreadPoolExecutor, run_started: float) -> Shop:
    scratch = lease.folder / "runner"
    scratch.mkdir()
    config = ctx.config
    numbers = itertools.count()

    faulty = _fault_maker(ctx, asyncio.get_running_loop())

    def sandbox_of(admitted: RolloutAdmitted, session: str, task: Task, staged: Staged, timeout: float) -> Sandbox:
        return faulty(admitted, session, task, maker.make(session, next(numbers), task, staged, timeout))

    def not_recorded(receipt: asyncio.Future[PubAck]) -> None:
        if not receipt.cancelled() and (error := receipt.exception()):
            ctx.log.warning("a phase was not recorded: %s", error)

    async def announce(event: Event) -> None:
        receipt = await ctx.bus.submit(event)
        receipt.add_done_callback(not_recorded)

    return Shop(
        run=ctx.bus.run,
        node=_node(ctx),
        image=ctx.config.sandbox.kind,
        config=ctx.config.agent,
        up=run_started,
        sessions=sessions,
        find_task=task_finder(TaskIndex(ctx.dir / "tasks"), Stage(scratch / "tasks")),
        admission=Admission(Need.of(config.runners.memory_mb, config.runners.cpus), pull_share(config.waves, config.runners.count)),
        start_of=start_maker(config.sandbox, maker.limits),
        retry_at=lambda tries: retry_at(config.waves, tries=tries, now=time.time(), random=random.random()),
        sandbox_of=sandbox_of,
        harness_of=harness_maker(ctx.config.agent, scratch),
        scratch=scratch,
        artifacts=ctx.dir / "artifacts",
        pool=pool,
        announce=announce,
        claim=ctx.bus.claim,
    )
