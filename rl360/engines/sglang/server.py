"""One SGLang server as a child process, in a process group of its own, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rl360.bus.events import Boundary, Cause
from rl360.child import Child
from rl360.engines.client import EngineClient, EngineError
from rl360.engines.generation import first_of

_POLL: Final = 0.5
_SHOWN: Final = 4  # last lines of its log that an error shows
_WIDTH: Final = 300  # characters of a line


class Server:
    """Started by `start`, ended by `stop` whatever happened; its process is the recorded one."""

    def __init__(self, generation: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.generation = generation
        self._child = Child(generation, command, log, env)

    async def start(self, client: EngineClient, *, seconds: float, log: logging.Logger) -> None:
        """Returns when it serves. Raises EngineError (START_FAILED) when it ends first, or doesn't serve within `seconds`."""
        await self._child.start()
        log.info("%s: process %d: %s", self.generation, self._child.pid, " ".join(self._child.command))
        try:
            async with asyncio.timeout(seconds):
                await first_of(self.ended(), _serving(client))
        except TimeoutError:
            raise self._error(Cause.START_FAILED, f"does not serve {seconds:g} s after its start") from None

    async def ended(self) -> None:
        """Wait for its end, and raise it as an EngineError."""
        status = await self._child.wait()
        raise self._error(Cause.LOST, f"the server ended with status {status}")

    async def watch(self, client: EngineClient, *, seconds: float) -> None:
        """Raise EngineError when it has been silent for `seconds`. Loading weights is silence, so a push must fit in."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while loop.time() - heard < seconds:
            try:
                await client.server_info(timeout=seconds / 2)
                heard = loop.time()
            except EngineError:
                pass  # counted by the clock
            await asyncio.sleep(min(seconds / 10, 5.0))
        raise self._error(Cause.TIMEOUT, f"the server was silent for {seconds:g} s")

    async def stop(self, seconds: float) -> None:
        await self._child.stop(seconds)

    def _error(self, cause: Cause, what: str) -> EngineError:
        lines = [line[:_WIDTH] for line in self._child.tail(_SHOWN).splitlines()]
        detail = "\n".join([f"{what}; the end of {self._child.log}:", *lines])
        return EngineError(Boundary.ENGINE, cause, detail, generation=self.generation)


async def _serving(client: EngineClient) -> None:
    while True:
        if await client.healthy():
            return
        await asyncio.sleep(_POLL)
