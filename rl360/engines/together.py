"""Acting together: a call to every engine while the trainer does its own part. When one of them fails the whole act has failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from rl360.engines.client import EngineClient, EngineError

T = TypeVar("T")
Clients = Mapping[str, EngineClient]
Faults = dict[str, EngineError]

_GRACE: Final = 1.0  # seconds that the others get to end by themselves when one has failed


class Broken(Exception):
    """A step of the push failed. `faults` names the engines that said so: victims of a dead peer are among them."""

    def __init__(self, faults: Faults, trainer: str = "") -> None:
        super().__init__(trainer or "; ".join(str(e) for e in faults.values()))
        self.faults = faults


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


async def together(calls: Mapping[str, Coroutine[Any, Any, None]], own: Awaitable[None]) -> None:
    """Await the engines' calls and the trainer's own part at once. Raises Broken as soon as it can't succeed any more."""
    mine = asyncio.ensure_future(own)
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


def detached(own: Callable[[], None]) -> asyncio.Future[None]:
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
