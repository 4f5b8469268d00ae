"""What every run needs once, whoever starts its processes: the journal's start and end, its high-water mark, an eye on the disk.

`Supervisor` is a lead that starts the processes as well; `rl360 cluster lead` is one whose processes others start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import msgspec

from rl360.bus import events as ev
from rl360.bus import nats_server
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.bus.codec import Recorded
from rl360.bus.connection import BusError, JetStreamError
from rl360.config import Config
from rl360.errors import InputError
from rl360.launch import pulse, resume, storage
from rl360.launch.high_water import HighWater, Mark
from rl360.launch.rundir import RunDir
from rl360.trainer import checkpoints

log = logging.getLogger(__name__)

LAST_WORD: Final = 5.0  # seconds to record how the run ended, and to let go of the bus
NAME: Final = "lead"
_PERIOD: Final = 2.0  # seconds between two looks at the journal and the disk


class RunFailed(InputError):
    """The run can't go on; the message says why and where to look."""


class Lead:
    """One run, while it goes on. `async with` opens its journal; leaving it lets go."""

    def __init__(self, folder: RunDir, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self.config: Config = folder.config
        self.addresses, self.secrets = folder.addresses, folder.secrets
        self.blobs = BlobStore(folder.path / "blobs")
        self.resumed = 0
        self.mute = False  # nothing can be recorded any more
        self.stack = AsyncExitStack()
        self.marks = HighWater(folder.path / "nats" / "seen.json")
        self._beside: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Lead:
        self.refuse_full_disk()
        try:
            await self.open_bus()
        except JetStreamError as e:
            await self.stop()
            raise RunFailed(storage.journal_full(e, self.folder.path)) from e if e.full else None
        except BaseException:
            await self.stop()
            raise
        self.run_beside(self._watch())
        self.run_beside(pulse.beat(self.folder.path / pulse.FOLDER / NAME))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Let go of the run; its processes are others' to end."""
        self.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                await self.stack.aclose()

    def pids(self) -> dict[str, int]:
        """Recorded process ids of what it started."""
        return {}

    def seen(self, recorded: Recorded) -> None:
        """Whoever follows the journal tells what it saw, for the high-water mark."""
        self.marks.note(Mark(recorded.seq, recorded.time))

    async def failed(self) -> str:
        """Wait until the run can't go on; returns why."""
        return await asyncio.shield(self._failed)

    async def finish(self, why: str, steps: int) -> None:
        """Record how the run ended, where that can be recorded."""
        if self.mute:
            return
        event = ev.RunFinished(run=self.config.run.name, why=why, steps=steps, resumed=self.resumed)
        try:
            async with asyncio.timeout(LAST_WORD):
                await self.bus.publish(event)
        except (BusError, TimeoutError) as e:
            log.error("the run's end could not be recorded: %s", e or "no receipt")

    # ------------------------------------------------------------------------------------------------ for whoever leads

    def refuse_full_disk(self) -> None:
        """Raises RunFailed."""
        if why := storage.shortage(self.folder.path, self.config.supervise.min_free_mb):
            raise RunFailed(f"{why}; {storage.remedy(self.folder.path)}")

    @property
    def address(self) -> BusAddress:
        return BusAddress(url=self.addresses.nats, user=nats_server.ADMIN, password=self.secrets.nats[nats_server.ADMIN])

    async def open_bus(self) -> None:
        """Connect, see whether the journal is whole, and record the start. Raises BusError."""
        self.bus = await self.stack.enter_async_context(Bus.connect(self.address, self.config.run.name, self.blobs, name=NAME))
        await self.bus.create_streams()
        mark = self.marks.read()
        rewound = await resume.look(self.bus, mark, self.folder.path / checkpoints.FOLDER)
        self.resumed = await resume.announce(self.bus, self.config)
        if rewound is not None:
            self.say(resume.told(rewound))
            await self.bus.publish(msgspec.structs.replace(rewound, resumed=self.resumed))
        elif mark is not None:
            self.marks.note(mark)
        self.run_beside(self.marks.keep())

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something for as long as the run goes on; what ends it ends the run."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._over)
        self._beside.append(task)

    def cancel(self) -> None:
        """End what runs beside."""
        for task in self._beside:
            task.cancel()

    def fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_result(why)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            full = storage.out_of_space(error)
            self.fail(f"{full}; {storage.remedy(self.folder.path)}" if full else f"{type(error).__name__}: {error}")

    async def _watch(self) -> None:
        """Whoever starts nats-server again may give it another store, or a full disk."""
        reconnects = self.bus.reconnects
        while True:
            await asyncio.sleep(_PERIOD)
            if why := storage.shortage(self.folder.path, self.config.supervise.min_free_mb):
                self.mute = True
                return self.fail(f"{why}; {storage.remedy(self.folder.path)}")
            mark, seen = self.marks.newest, self.bus.reconnects
            if mark is None or seen == reconnects:
                continue
            try:
                whole = await self.bus.holds(mark.seq, mark.time)
            except BusError:
                continue  # it is away: its owner starts it again
            reconnects = seen
            if not whole:
                return self.fail(
                    "the journal lost its end while nats-server was down (was its store replaced, or its disk?): start all workers anew"
                )
