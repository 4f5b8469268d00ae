"""The engine's thread: runs steps while there is work, and between steps whatever others ask it to run."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import torch

from rl360.engines.tiny.batching import Scheduler

T = TypeVar("T")
_log = logging.getLogger("rl360.engine")

IDLE_SECONDS: Final = 1.0


class EngineDown(Exception):
    """The engine's thread has ended; the process should, too."""


class EngineLoop:
    """Owns the thread. `pause_limit` seconds paused, it resumes by itself: a dead pusher must not stop it for good (CASES 34)."""

    def __init__(self, scheduler: Scheduler, *, pause_limit: float) -> None:
        self.scheduler = scheduler
        self._pause_limit = pause_limit
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._stopping = False
        self.ended: Future[None] | None = None
        """Set by `start`; done when the thread has ended, with the exception that ended it."""

    def start(self) -> None:
        self.ended = self._executor.submit(self._run)

    def stop(self) -> None:
        """End after the step under way. Requests not finished stay so."""
        self._inbox.put(self._stop)
        self._executor.shutdown(wait=True)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the engine's thread, between steps. Raises EngineDown when the thread has ended."""
        if self.ended is None or self.ended.done():
            raise EngineDown("the engine's thread has ended")
        future: Future[T] = Future()
        self._inbox.put(lambda: _resolve(future, function))
        return future

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        torch.set_num_threads(1)
        while not self._stopping:
            self._serve_inbox()
            if self.scheduler.runnable:
                self.scheduler.step()
            self._watch_pause()

    def _serve_inbox(self) -> None:
        """Run what was asked for; with no step to make, wait for it."""
        try:
            if not self.scheduler.runnable:
                self._inbox.get(timeout=IDLE_SECONDS)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _watch_pause(self) -> None:
        paused_at = self.scheduler.paused_at
        if paused_at is not None and time.monotonic() - paused_at > self._pause_limit:
            _log.warning("paused for more than %g s: resuming with weight version %s", self._pause_limit, self.scheduler.version)
            self.scheduler.counters.forced_resumes += 1
            self.scheduler.resume()


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as e:
        future.set_exception(e)
        raise  # nothing expected fails in the engine's thread
