"""A run's child processes: started, recorded, started again when they end, ended with their groups."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from rl360.child import Child
from rl360.launch.rundir import RunDir

_BACKOFF: Final = (0.0, 0.2, 0.5, 1.0, 2.0)  # seconds before the 1st, 2nd, … restart of a child
_ENV: Final = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class Children:
    """`ended` is asked about each child that ended by itself: True starts it again, and then `restarted` is told.

    Both get the child, whose `restarts` counts this one, and its exit status.
    """

    def __init__(
        self, folder: RunDir, ended: Callable[[Child, int], Awaitable[bool]], restarted: Callable[[Child, int], Awaitable[None]]
    ) -> None:
        self._folder, self._ended, self._restarted = folder, ended, restarted
        self._children: dict[str, Child] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._closing = False

    @property
    def by_name(self) -> Mapping[str, Child]:
        return MappingProxyType(self._children)

    async def start(self, name: str, command: Sequence[str]) -> None:
        child = Child(name, command, self._folder.path / "logs" / f"{name}.log", env=_ENV)
        self._children[name] = child
        await child.start()
        self._record()
        self._watchers.append(asyncio.create_task(self._watch(child), name=f"watch {name}"))

    async def restart(self, name: str) -> None:
        """Start a child that ended, unwatched: when all are being ended, and one is needed for a last word."""
        await self._children[name].start()
        self._record()

    async def _watch(self, child: Child) -> None:
        while True:
            status = await child.wait()
            if self._closing:
                return
            await child.kill()  # what is left of its group
            child.restarts += 1
            if not await self._ended(child, status) or self._closing:
                return
            await asyncio.sleep(_BACKOFF[min(child.restarts, len(_BACKOFF)) - 1])
            await child.start()
            self._record()
            await self._restarted(child, status)

    # ------------------------------------------------------------------------------------------------ end

    def close(self) -> None:
        """From here on nothing is started again."""
        self._closing = True

    def cancel(self) -> None:
        for task in self._watchers:
            task.cancel()

    async def stop(self, which: Callable[[str], bool], seconds: float) -> None:
        """SIGTERM to those whose name is chosen, SIGKILL to what is left after `seconds`."""
        await asyncio.gather(*(c.stop(seconds) for n, c in self._children.items() if which(n) and c.pid))

    async def kill(self, which: Callable[[str], bool]) -> None:
        await asyncio.gather(*(c.kill() for n, c in self._children.items() if which(n)))

    def pids(self) -> dict[str, int]:
        """Recorded process ids of what runs now."""
        return {name: c.pid for name, c in self._children.items() if c.pid}

    def _record(self) -> None:
        (self._folder.path / "children.json").write_text(json.dumps(self.pids(), indent=1))

    def forget(self) -> None:
        (self._folder.path / "children.json").unlink(missing_ok=True)
