"""`rl360 run`: prepare the folder, start everything, show it, end it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live

from rl360.agents import faults
from rl360.bus import events as ev
from rl360.config import Config, ConfigError, load
from rl360.dash.fold import RunView
from rl360.dash.table import PlainLines, render
from rl360.launch import prepare, summary
from rl360.launch.lead import Lead, RunFailed
from rl360.launch.rundir import RunDir, new_path, under_way
from rl360.launch.supervisor import Supervisor
from rl360.launch.telemetry import Telemetry, exporter

RUNS: Final = Path("runs")
_REFRESH: Final = 0.5  # seconds between two looks at the table


def run(*, recipe: Path | None, path: Path | None, resume: Path | None, overrides: tuple[str, ...], plain: bool) -> int:
    """Train; returns the exit status: 0 finished, 128 + signal when interrupted (Ctrl-C: 130).

    Raises ConfigError before anything starts, RunFailed when the run can't go on.
    """
    return show(_folder(recipe, path, resume, overrides), Supervisor, plain=plain)


def lead(path: Path, *, plain: bool) -> int:
    """The same for a run whose processes others start, in the folder that `rl360 cluster init` laid out."""
    return show(RunDir(path), Lead, plain=plain)


def show(folder: RunDir, leading: Callable[[RunDir, Callable[[str], None]], Lead], *, plain: bool) -> int:
    """Lead a run to its end, and show it."""
    console = _Screen(highlight=False)
    return asyncio.run(_Run(folder, console, plain or not console.is_terminal, leading).main())


def _folder(recipe: Path | None, path: Path | None, resume: Path | None, overrides: tuple[str, ...]) -> RunDir:
    if resume is not None:
        if recipe is not None or overrides:
            raise ConfigError("--resume goes on under the recorded recipe: leave the recipe and --set, --steps, --seed away")
        folder = RunDir(resume)
        _ = folder.config  # a folder that holds no run is refused here
        return folder
    if recipe is None:
        raise ConfigError("name a recipe (recipes/tiny.toml) or a run to go on with (--resume DIR)")
    config: Config = load(recipe, overrides)
    prepare.policy(config)
    prepare.sources(config)
    prepare.agent(config)
    folder = RunDir(path or new_path(RUNS, config.run.name))
    folder.create(config if folder.exists else prepare.upcycle(config, folder.path))
    return folder


@contextmanager
def _while_seen() -> Generator[None]:
    """A run outlives its screen (a closed terminal, `| head`): from then on it speaks to nobody. The journal has what it would say."""
    try:
        yield
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process


class _Run:
    def __init__(self, folder: RunDir, console: Console, plain: bool, leading: Callable[[RunDir, Callable[[str], None]], Lead]) -> None:
        self._folder, self._console, self._plain, self._leading = folder, console, plain, leading
        self._view = RunView()
        self._lead: Lead | None = None  # None: still preparing
        endpoint = folder.config.telemetry.otlp_endpoint
        self._telemetry = Telemetry(exporter(endpoint)) if endpoint else None
        self._interrupts, self._status = 0, 0
        self._interrupted = asyncio.Event()
        self._finished = asyncio.Event()

    def say(self, line: str) -> None:
        with _while_seen():
            self._console.print(line, markup=False, soft_wrap=True)

    async def main(self) -> int:
        self.say(f"run {self._folder.config.run.name} in {self._folder.path}")
        for other in under_way(self._folder.path.parent, besides=self._folder.path):
            self.say(f"{other} is under way as well: they share this machine, and both will be slower")
        if self._folder.config.faults:
            self.say(faults.warning(self._folder.config.faults))
        self._heed_signals()
        await prepare.tasks(self._folder, self.say)
        lead = self._leading(self._folder, self.say)
        self._lead = lead
        async with lead:
            if lead.resumed:
                self.say(f"resumed for the {lead.resumed}. time")
            why = await self._until_over(lead)
            await lead.finish(why, len(self._view.finished_steps()))
        if self._telemetry:
            await self._tell_traces(self._telemetry)
        return self._conclude(why)

    async def _tell_traces(self, telemetry: Telemetry) -> None:
        await telemetry.close()
        lost = f", {telemetry.failed} could not be (the journal has them: rl360 trace)" if telemetry.failed else ""
        self.say(f"traces             {telemetry.sent} spans exported{lost}")

    def _heed_signals(self) -> None:
        ends = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # what nohup does
            ends.append(signal.SIGHUP)
        for number in ends:
            asyncio.get_running_loop().add_signal_handler(number, self._on_interrupt, number)

    def _on_interrupt(self, number: signal.Signals) -> None:
        self._interrupts += 1
        self._status = 128 + number
        self._interrupted.set()
        if self._lead is None:  # sandboxes end with us, the next start sweeps their places; what qualified is kept
            self.say(f"stopped while preparing; go on with: rl360 run --resume {self._folder.path}")
            os._exit(self._status)
        if self._interrupts == 1:
            self.say("stopping: attempts under way are ended within their bounds; interrupt again to kill")
        else:
            for pid in self._lead.pids().values():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(self._status)

    async def _until_over(self, lead: Lead) -> str:
        follow = asyncio.create_task(self._follow(lead))
        show = asyncio.create_task(self._show())
        failed = asyncio.create_task(lead.failed())
        ends = {asyncio.create_task(self._finished.wait()): "steps", asyncio.create_task(self._interrupted.wait()): "interrupted"}
        done, _ = await asyncio.wait({follow, failed, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for task in (show, *ends, failed):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await show
        if failed in done:
            follow.cancel()
            return f"failed: {failed.result()}"
        if follow in done:
            follow.result()  # raises what ended it
        follow.cancel()
        return next(why for task, why in ends.items() if task in done)

    async def _follow(self, lead: Lead) -> None:
        async for record in lead.bus.follow(stop=asyncio.Event()):
            self._view.on(record)
            lead.seen(record)
            if self._telemetry:
                self._telemetry.on(record)
            if isinstance(record.event, ev.RunFinished) and record.event.why == "steps":
                self._finished.set()

    async def _show(self) -> None:
        if self._plain:
            lines = PlainLines(self.say)
            while True:
                try:
                    await asyncio.sleep(_REFRESH)
                except asyncio.CancelledError:
                    lines.update(self._view, time.time(), over=True)
                    raise
                lines.update(self._view, time.time())
        with _while_seen(), Live(console=self._console, auto_refresh=False, transient=False) as live:
            while True:
                try:
                    await asyncio.sleep(_REFRESH)
                finally:
                    live.update(render(self._view, time.time()), refresh=True)

    def _conclude(self, why: str) -> int:
        for text in summary.lines(self._view, self._folder.path):
            self.say(text)
        if why.startswith("failed: "):
            raise RunFailed(why.removeprefix("failed: "))
        if why == "interrupted":
            self.say(f"go on with: rl360 run --resume {self._folder.path}")
            return self._status
        picture = self._folder.path / "reward.svg"
        if summary.draw([(self._folder.config.run.name, self._view)], picture):
            self.say(f"reward picture: {picture}")
        return 0
