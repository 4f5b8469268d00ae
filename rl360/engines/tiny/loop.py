"""The engine's thread: runs steps while there is work, and between steps whatever others ask it to run."""

from __future__ import annotations

import logging
import queue
import threading
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
        self._inbox: queue.SimpleQueue[Callable[[bool], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._stopping = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def start(self) -> Future[None]:
        """Start the thread; the future ends with it, with the exception that ended it."""
        return self._executor.submit(self._run)

    def stop(self) -> None:
        """End after the step under way. Requests not finished stay so."""
        self._stopping = True
        self._inbox.put(lambda _: None)
        self._executor.shutdown(wait=True)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the engine's thread, between steps. Raises EngineDown, at once or by the future, when it has ended."""
        future: Future[T] = Future()
        with self._gate:
            if self._closed:
                raise EngineDown("the engine's thread has ended")
            self._inbox.put(lambda alive: _resolve(future, function, alive))
        return future

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while not self._stopping:
                self._serve_inbox()
                if self.scheduler.runnable:
                    self.scheduler.step()
                self._watch_pause()
        finally:
            self._close()

    def _serve_inbox(self) -> None:
        """Run what was asked for; with no step to make, wait for it."""
        try:
            if not self.scheduler.runnable:
                self._inbox.get(timeout=IDLE_SECONDS)(True)
            while True:
                self._inbox.get_nowait()(True)
        except queue.Empty:
            return

    def _watch_pause(self) -> None:
        paused_at = self.scheduler.paused_at
        if paused_at is not None and time.monotonic() - paused_at > self._pause_limit:
            _log.warning("paused for more than %g s: resuming with weight version %s", self._pause_limit, self.scheduler.version)
            self.scheduler.counters.forced_resumes += 1
            self.scheduler.resume()

    def _close(self) -> None:
        """Nobody waits for an answer of a thread that has ended."""
        with self._gate:
            self._closed = True
        while not self._inbox.empty():
            self._inbox.get_nowait()(False)


def _resolve(future: Future[T], function: Callable[[], T], alive: bool) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if not alive:
        future.set_exception(EngineDown("the engine's thread has ended"))
        return
    try:
        future.set_result(function())
    except Exception as e:
        future.set_exception(e)
        raise  # nothing expected fails in the engine's thread
