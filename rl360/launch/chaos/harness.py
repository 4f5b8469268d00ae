"""`rl360 chaos`: kill -9 at seeded moments, over short runs one after the other, and a check of each that ended.

Every blow is a line: when, what, at which event, and where the run was. A run that stands still or fails is a finding too.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rl360.audit import audit
from rl360.bus.blobs import BlobStore
from rl360.bus.connection import BusError
from rl360.config import Config, ConfigError, load
from rl360.launch import journal_files
from rl360.launch.chaos import check
from rl360.launch.chaos.plan import Blow, blows, targets
from rl360.launch.chaos.victim import Stuck, Victim

_FINDINGS = 5  # of an audit that are shown


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """One blow that fell."""

    number: int
    run: int
    seconds: float  # from the start of it all
    target: str
    moment: str
    where: str

    def __str__(self) -> str:
        return f"{self.number:4d} {self.seconds:7.1f} s  run {self.run}  {self.target:<12} at {self.moment:<28}  {self.where}"


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """One run after its end. `problems`: what is wrong with it; empty: nothing."""

    run: int
    seed: int
    schedule: str
    blows: int
    seconds: float
    tally: check.Tally | None
    problems: tuple[str, ...]

    def __str__(self) -> str:
        t = self.tally
        said = ""
        if t is not None:
            said = f"{t.attempts} attempts, {len(t.lost)} lost, {len(t.double)} double, infra {t.infra or 0}, "
            said += f"{t.pushes} pushes, {t.failed_pushes} engines missed one, the slowest took {t.slowest_push:.1f} s, "
        problems = "".join(f"\n      PROBLEM: {p}" for p in self.problems)
        return f"run {self.run} ({self.schedule}, seed {self.seed}): {self.blows} blows, {self.seconds:.0f} s, {said}" + (
            problems or "audit clean"
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    kills: int
    seconds: float
    by_target: dict[str, int]
    attempts: int
    lost: int
    double: int
    problems: int
    runs: tuple[Ended, ...]
    struck: tuple[Struck, ...]

    def __str__(self) -> str:
        targets = ", ".join(f"{name} {n}" for name, n in self.by_target.items())
        return (
            f"{self.kills} kills in {self.seconds:.0f} s over {len(self.runs)} runs (seed {self.seed}): {targets}\n"
            f"{self.attempts} attempts, {self.lost} lost, {self.double} double, {self.problems} problems"
        )


class Chaos:
    """Strikes until `kills` blows fell, over as many runs as that takes; each run is let end by itself."""

    def __init__(self, recipe: Path, overrides: tuple[str, ...], root: Path, *, kills: int, seed: int, only: str, keep: bool) -> None:
        self._recipe, self._overrides, self._root = recipe, overrides, root.absolute()
        self._only, self._keep = only, keep
        self._config: Config = load(recipe, overrides)
        targets(self._config, only)  # refuses it before anything starts
        self._kills, self._seed = kills, seed
        self._started = time.monotonic()
        self._struck: list[Struck] = []
        self._ended: list[Ended] = []

    async def run(self, say: Callable[[str], None]) -> Report:
        self._say = say
        self._root.mkdir(parents=True, exist_ok=True)
        while len(self._struck) < self._kills:
            ended = await self._one(len(self._ended))
            self._ended.append(ended)
            say(str(ended))
        return self._report()

    async def _one(self, number: int) -> Ended:
        seed, began, before = 1000 * self._seed + number, time.monotonic(), len(self._struck)
        schedule = ("sync", "one_step")[number % 2]
        sets = [part for o in (*self._overrides, f"run.schedule={schedule}") for part in ("--set", o)]
        victim = Victim([str(self._recipe), "--seed", str(seed), *sets], self._root / f"run-{number}")
        problems: list[str] = []
        try:
            await victim.start()
            await self._strike_until_over(victim, number, blows(seed, self._config, self._only))
        except Stuck as e:
            problems.append(str(e))
        finally:
            await victim.end()
        tally, found = await _checked(victim, self._config.run.steps)
        problems += found
        if not problems and not self._keep:
            shutil.rmtree(victim.path)
        return Ended(
            run=number,
            seed=seed,
            schedule=schedule,
            blows=len(self._struck) - before,
            seconds=time.monotonic() - began,
            tally=tally,
            problems=tuple(problems),
        )

    async def _strike_until_over(self, victim: Victim, number: int, plan: Iterator[Blow]) -> None:
        while True:
            blow = next(plan) if len(self._struck) < self._kills else None
            if not await victim.moment(blow) or blow is None:
                return
            where = victim.where
            if await victim.strike(blow.target):
                self._tell(number, blow, where)

    def _tell(self, run: int, blow: Blow, where: str) -> None:
        seconds = time.monotonic() - self._started
        struck = Struck(number=len(self._struck) + 1, run=run, seconds=seconds, target=blow.target, moment=str(blow), where=where)
        self._struck.append(struck)
        self._say(str(struck))

    def _report(self) -> Report:
        tallies = [e.tally for e in self._ended if e.tally]
        return Report(
            seed=self._seed,
            kills=len(self._struck),
            seconds=time.monotonic() - self._started,
            by_target=dict(sorted(Counter(s.target for s in self._struck).items())),
            attempts=sum(t.attempts for t in tallies),
            lost=sum(len(t.lost) for t in tallies),
            double=sum(len(t.double) for t in tallies),
            problems=sum(len(e.problems) for e in self._ended),
            runs=tuple(self._ended),
            struck=tuple(self._struck),
        )


async def _checked(victim: Victim, steps: int) -> tuple[check.Tally | None, list[str]]:
    """What is wrong with a run that ended."""
    problems: list[str] = []
    if victim.status:
        problems.append(f"exit status {victim.status}: {victim.output}")
    if left := victim.folder.processes():
        problems.append(f"left behind: {'; '.join(left)}")
    try:
        async with journal_files.open_source(victim.path) as source:
            journal = await source.read()
    except BusError as e:
        return None, [*problems, f"its journal can't be read: {e}"]
    tally = check.tally(journal.records, steps)
    problems += [f"{name}: {value}" for name, value in tally.wrong().items()]
    findings = await asyncio.to_thread(audit, journal, BlobStore(victim.path / "blobs"))
    problems += [f"audit: {finding}" for finding in findings[:_FINDINGS]]
    return tally, problems


def chaos(recipe: Path, overrides: tuple[str, ...], root: Path, *, kills: int, seed: int, only: str, keep: bool, out: Path | None) -> int:
    """Run it; 1 when there was a problem. Raises ConfigError for a recipe that can't run."""
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"{root} is not empty: name a new folder (--dir) for the runs that are to be killed")
    work = Chaos(recipe, overrides, root, kills=kills, seed=seed, only=only, keep=keep)
    report = asyncio.run(work.run(lambda line: print(line, flush=True)))
    print(report)
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 1 if report.problems else 0
