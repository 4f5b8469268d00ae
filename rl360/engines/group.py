"""The broadcast group of one plan: the trainer as rank 0, every engine in its seat.

Trainer and engines must act at the same time: each call goes to all engines while the trainer's own part runs in a thread.
When one of them fails the whole act has failed, and the group with it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from torch import Tensor

from rl360.engines.client import EngineClient, EngineError
from rl360.engines.collective import Backend, Collective
from rl360.engines.contract import InitWeightsGroup, UpdateFromDistributed
from rl360.engines.plan import Bucket, PushPlan

log = logging.getLogger(__name__)

T = TypeVar("T")
Clients = Mapping[str, EngineClient]
Faults = dict[str, EngineError]

_GRACE: Final = 1.0  # seconds that the others get to end by themselves when one has failed


class Broken(Exception):
    """A step of the push failed. `faults` names the engines that said so: victims of a dead peer are among them."""

    def __init__(self, faults: Faults, trainer: str = "") -> None:
        super().__init__(trainer or "; ".join(str(e) for e in faults.values()))
        self.faults = faults


class WeightGroup:
    """Made by `form`; usable for pushes of its plan until something breaks."""

    def __init__(self, plan: PushPlan, collective: Collective) -> None:
        self.plan, self._collective = plan, collective
        self.closed = False

    @classmethod
    async def form(cls, plan: PushPlan, clients: Clients, *, host: str, backend: Backend, timeout: float) -> WeightGroup:
        """Gather the plan's engines. Raises Broken when one doesn't come within `timeout` seconds."""
        name = f"rl360-{plan.digest[:12]}-{secrets.token_hex(4)}"
        collective = await asyncio.to_thread(Collective, host, name, plan.world, backend=backend, timeout=timeout)
        joins = {
            seat.generation: clients[seat.generation].join_group(
                InitWeightsGroup(
                    master_address=host,
                    master_port=collective.port,
                    rank_offset=seat.rank,
                    world_size=plan.world,
                    group_name=name,
                    backend=backend,
                )
            )
            for seat in plan.seats
        }
        try:
            await _together(joins, collective.connect)
        except BaseException:
            collective.close()
            raise
        return cls(plan, collective)

    async def send(self, bucket: Bucket, weights: Mapping[str, Tensor], clients: Clients, *, flush_cache: bool) -> None:
        """Broadcast one bucket to all engines. Raises Broken, and the group is closed."""
        request = UpdateFromDistributed(
            names=[s.name for s in bucket.shards],
            dtypes=[s.dtype for s in bucket.shards],
            shapes=[list(s.shape) for s in bucket.shards],
            group_name=self._collective.name,
            flush_cache=flush_cache,
        )
        tensors = [weights[s.name] for s in bucket.shards]
        calls = {g: clients[g].receive(request) for g in self.plan.generations}
        try:
            await _together(calls, lambda: self._collective.broadcast(tensors))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the group up, without a word to the engines."""
        self.closed = True
        self._collective.close()

    async def dissolve(self, clients: Clients, *, timeout: float) -> None:
        """Close the group and tell those of its engines that are among `clients`; nobody waits for an answer beyond `timeout`."""
        self.close()
        told = {g: c for g, c in clients.items() if g in self.plan.generations}
        _, faults = await on_all(told, lambda c: c.leave_group(self._collective.name, timeout=timeout))
        for error in faults.values():
            log.info("group %s: %s", self._collective.name, error)


async def on_all(clients: Clients, call: Callable[[EngineClient], Awaitable[T]]) -> tuple[dict[str, T], Faults]:
    """Call all engines at once; what each answered, and who failed."""
    answers = await asyncio.gather(*(call(c) for c in clients.values()), return_exceptions=True)
    good: dict[str, T] = {}
    faults: Faults = {}
    for generation, answer in zip(clients, answers, strict=True):
        if isinstance(answer, EngineError):
            faults[generation] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            good[generation] = answer
    return good, faults


async def _together(calls: Mapping[str, Coroutine[Any, Any, None]], own: Callable[[], None]) -> None:
    """Run the engines' calls and the trainer's own blocking part at once. Raises Broken as soon as it can't succeed any more."""
    mine = _detached(own)
    theirs = {g: asyncio.ensure_future(call) for g, call in calls.items()}
    everything: set[asyncio.Future[None]] = {mine, *theirs.values()}
    try:
        _, pending = await asyncio.wait(everything, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_GRACE)
    finally:
        for task in everything:
            task.cancel()
    faults, trainer = _faults(theirs), _failure(mine)
    if faults or trainer:
        raise Broken(faults, trainer)


def _faults(tasks: Mapping[str, asyncio.Future[None]]) -> Faults:
    faults: Faults = {}
    for generation, task in tasks.items():
        if not task.done() or task.cancelled():
            continue
        error = task.exception()
        if isinstance(error, EngineError):
            faults[generation] = error
        elif error is not None:
            raise error
    return faults


def _failure(mine: asyncio.Future[None]) -> str:
    if not mine.done() or mine.cancelled() or (error := mine.exception()) is None:
        return ""
    if not isinstance(error, RuntimeError):
        raise error
    return f"trainer: {str(error).splitlines()[0]}"


def _detached(own: Callable[[], None]) -> asyncio.Future[None]:
    """Run in a daemon thread, which may be abandoned: neither a push nor the trainer's end waits for a peer that is gone."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # from here on a cancellation only stops the waiting

    def run() -> None:
        try:
            own()
        except Exception as e:  # noqa: BLE001  (handed on to whoever waits)
            future.set_exception(e)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="push", daemon=True).start()
    return asyncio.wrap_future(future)
