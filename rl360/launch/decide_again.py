"""`rl360 explain` and `rl360 replay`: one step of a run, from its folder alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rl360.bus.blobs import BlobMissing
from rl360.config import ConfigError
from rl360.extras import MissingExtra
from rl360.launch.journal_files import open_source, records
from rl360.replay.compare import Comparison, compare
from rl360.replay.comparison_text import comparison_lines, measured_line, reproduction_lines
from rl360.replay.decide import Decision, decide_step
from rl360.replay.explain import explain
from rl360.replay.facts import ReplayError, StepFacts, facts_of
from rl360.replay.reproduce import reproduce
from rl360.replay.rules import RECORDED, ReplayRules, read_rules
from rl360.replay.text import lines
from rl360.trainer.checkpoints import CheckpointError


def facts(path: Path, step: int, journal: str = "") -> StepFacts:
    """What the journal of the run in `path` (or the copy `journal`) says about a step. Raises ConfigError when it says nothing."""
    try:
        return facts_of(asyncio.run(records(path, [step], journal=journal)), step)
    except ReplayError as e:
        raise ConfigError(f"{path}: {e}") from None


def explain_step(path: Path, step: int, *, journal: str, as_json: bool, page: Path | None) -> int:
    """Print where a step's gradient went; write it as a page when asked."""
    explanation = explain(facts(path, step, journal))
    if page is not None:
        from rl360.replay.page import render

        page.write_text(render(explanation))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(explanation), indent=1).decode())
    else:
        print(*lines(explanation), sep="\n")
    return 0


def replay_step(path: Path, step: int, *, journal: str, with_: str, overrides: Sequence[str], gradient: bool, as_json: bool) -> int:
    """Decide a step again: first as recorded, then under other rules when some are given. 1: a recorded decision comes out differently."""
    known = facts(path, step, journal)
    try:
        made = reproduce(known)
        other = _other(known, with_, overrides)
    except ReplayError as e:
        raise ConfigError(f"{path}: {e}") from None
    comparison = compare(made.decision, other or made.decision, (RECORDED, with_ or ("changed" if overrides else RECORDED)))
    if gradient:
        comparison = _measured(comparison, known, path, made.decision, other or made.decision)
    if as_json:
        body = {"step": step, "checked": made.checked, "differences": [str(d) for d in made.differences], "comparison": comparison}
        print(msgspec.json.format(msgspec.json.encode(body), indent=1).decode())
    else:
        print(*reproduction_lines(step, made), sep="\n")
        if known.pruned:
            print(f"step {step} was pruned by retention: its events are whole, its blobs and checkpoints are gone")
        if other is not None:
            print("", *comparison_lines(comparison), sep="\n")
        elif comparison.measured is not None:
            print(measured_line(comparison.measured))
    return 1 if made.differences else 0


def copy_into(path: Path, step: int, name: str, *, before: str) -> int:
    """Copy a step into a journal of its own, in the store of the same run."""
    copied = asyncio.run(_copy(path, step, name, before))
    print(f"{copied} events of step {step} copied into journal {name!r}")
    print(f"start a worker on it: rl360 worker {before or 'filter'} --dir {path} --journal {name}")
    print(f"compare:              rl360 replay {path} --step {step} --journal {name}")
    return 0


async def _copy(path: Path, step: int, name: str, before: str) -> int:
    from rl360.journal.namespace import copy_step
    from rl360.journal.stream import StreamSource

    async with open_source(path) as source:
        if not isinstance(source, StreamSource):
            raise ConfigError(f"{path} is an imported archive, which live workers can't follow: copy a step of a run's own folder")
        return await copy_step(source.bus, step, name, before=before)


def _other(known: StepFacts, with_: str, overrides: Sequence[str]) -> Decision | None:
    if not with_ and not overrides:
        return None
    return decide_step(known, read_rules(ReplayRules.of(known.config), with_, overrides))


def _measured(comparison: Comparison, known: StepFacts, path: Path, before: Decision, after: Decision) -> Comparison:
    try:
        from rl360.replay.gradient import measure
    except ModuleNotFoundError as e:
        raise MissingExtra("--gradient", e.name or "torch", "trainer") from None
    try:
        return msgspec.structs.replace(comparison, measured=measure(known, path, before, after))
    except (BlobMissing, CheckpointError) as e:
        if not known.pruned:
            raise
        raise ConfigError(f"{path}: step {known.step} was pruned by retention: replay it without --gradient ({e})") from None
