"""The trainer's ranks as the event loop sees them: commands run in one thread, children are watched and ended."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from rl360.config import Config
from rl360.trainer import commands
from rl360.trainer.distributed import Child, Crew, kill_children, meeting_file, process_groups, start_children
from rl360.trainer.expert_lines import ExpertLines
from rl360.trainer.rank import Answer

T = TypeVar("T")


class RankLost(RuntimeError):
    """A child rank ended: the trainer starts again from its last checkpoint."""


class CrewThread:
    """The `Crew` in its thread, and its child processes. An async context manager."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._executor = ThreadPoolExecutor(1, "trainer")
        self._inside = ExitStack()  # entered and left in the thread
        self._children: list[Child] = []

    async def __aenter__(self) -> CrewThread:
        self._meeting = meeting = meeting_place(self._folder)
        self._children = start_children(self._config, self._folder, meeting)
        try:
            self._crew = await self._call(lambda: self._enter(meeting))
        except BaseException:
            self._end()
            raise
        self.experts = ExpertLines(self._crew.experts, {rank: child.line for rank, child in enumerate(self._children, start=1)})
        await self.experts.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.experts.close()
        try:
            async with asyncio.timeout(self._config.supervise.drain_seconds):
                await self._call(self._leave)
        except TimeoutError:
            logging.getLogger(__name__).warning("the step in work goes on until the process ends; its checkpoint decides later")
        finally:
            self._end()

    def _enter(self, meeting: Path) -> Crew:
        trainer = self._config.trainer
        torch.set_num_threads(threads(self._config))
        self._inside.enter_context(process_groups(0, trainer, meeting_file(meeting) if trainer.ranks > 1 else None))
        return Crew(self._config, self._folder)

    def _leave(self) -> None:
        if all(child.process.poll() is None for child in self._children):
            self._crew.do(commands.Stop())
            self._inside.close()

    def _end(self) -> None:
        kill_children(self._children)
        shutil.rmtree(self._meeting)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def do(self, command: commands.Command) -> Answer:
        """Carry a command out on all ranks. Raises RankLost when a child ended instead."""
        self.check()
        return await self._call(lambda: self._crew.do(command))

    def check(self) -> None:
        """Raises RankLost when a child rank has ended."""
        for rank, child in enumerate(self._children, start=1):
            if child.process.poll() is not None:
                raise RankLost(f"rank {rank} ended with status {child.process.returncode}; its log lines stand in the trainer's log")

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def meeting_place(folder: Path) -> Path:
    """An empty folder in the run's, for the ranks of this process; what trainers left that were killed is removed."""
    ranks = folder / "ranks"
    place = ranks / str(os.getpid())
    for old in ranks.glob("*"):
        if old == place or not Path("/proc", old.name).exists():
            shutil.rmtree(old)
    place.mkdir(parents=True)
    return place


def threads(config: Config) -> int:
    """CPU threads of a rank: two while nothing else runs (`sync` trains between rollouts), else one.

    Two only where OpenMP's threads sleep while they wait for each other: spinning ones make a step five times as slow as soon as
    another process wants a core.
    """
    alone = config.run.schedule == "sync" and config.trainer.ranks == 1
    return min(2, os.cpu_count() or 1) if alone and os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" else 1
