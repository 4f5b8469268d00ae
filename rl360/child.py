"""One child process: started in a session of its own, recorded, and ended with its whole group.

A child dies with its supervisor (PR_SET_PDEATHSIG), so a supervisor that is killed leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """SIGKILL for this process when `parent`, which started it, ends; at once when it ended before this was asked for."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class Child:
    """A process with a log file. `start` may be called again after it ended."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.command, self.log = name, list(command), log
        self._env = {**os.environ, **(env or {})}
        self._process: asyncio.subprocess.Process | None = None
        self.restarts = 0
        self.started = 0.0  # unix seconds

    @property
    def pid(self) -> int:
        """Process id, which is also its group's (0: not running)."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    async def start(self) -> None:
        self.started = time.time()
        with open(self.log, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),
            )

    async def wait(self) -> int:
        """Exit status (negative: signal)."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, seconds: float) -> None:
        """SIGTERM, then SIGKILL to the whole group after `seconds`."""
        if self._process is None:
            return
        if self.pid:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(seconds):
                    await self._process.wait()
            except TimeoutError:
                pass
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL to the whole group, now."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # the whole group is gone already

    def tail(self, lines: int = 5) -> str:
        """The last lines of its log."""
        try:
            text = self.log.read_bytes()[-4096:].decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
