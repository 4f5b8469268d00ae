"""Signs of life of a run's processes: a worker's event loop touches a file once a second, a server answers a request."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rl360.child import Child
from rl360.launch.hang_watch import HangWatch, Pulse

FOLDER: Final = "alive"
_PERIOD: Final = 1.0  # seconds
_TIMEOUT: Final = 2.0


async def beat(path: Path) -> None:
    """Touch the file until cancelled."""
    path.parent.mkdir(exist_ok=True)
    while True:
        path.touch()
        await asyncio.sleep(_PERIOD)


class HangCare:
    """Ends children that give no sign of life; their watcher starts them again. `servers`: name -> URL that answers while it lives.

    `ending` is told before: the child's name, and why.
    """

    def __init__(
        self, run: Path, children: Mapping[str, Child], servers: Mapping[str, str], hang_seconds: float, ending: Callable[[str, str], None]
    ) -> None:
        self._folder, self._children, self._servers, self._ending = run / FOLDER, children, servers, ending
        self._watch = HangWatch(hang_seconds)
        self._answered: dict[str, Pulse] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_PERIOD)
            for name, why in self._watch.silent(time.monotonic(), await self._pulses()).items():
                self._ending(name, why)
                await self._children[name].kill()

    async def _pulses(self) -> dict[str, Pulse]:
        await asyncio.gather(*(self._ask(name, url) for name, url in self._servers.items()))
        running = {name: child for name, child in self._children.items() if child.pid}
        return {n: self._answered.get(n, Pulse(c.pid, 0.0)) if n in self._servers else self._touched(c) for n, c in running.items()}

    async def _ask(self, name: str, url: str) -> None:
        pid = self._children[name].pid
        known = self._answered.get(name, Pulse(pid, 0.0))
        answered = await asyncio.to_thread(_answers, url)
        self._answered[name] = Pulse(pid, time.monotonic() if answered else known.beat if known.pid == pid else 0.0)

    def _touched(self, child: Child) -> Pulse:
        try:
            at = (self._folder / child.name).stat().st_mtime
        except FileNotFoundError:
            at = 0.0
        return Pulse(child.pid, at if at > child.started else 0.0)


def _answers(url: str) -> bool:
    """Whether a server answers at all, be it with an error."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
