"""`rl360 replay` without a step: every trained step decided again, a line each, and a picture of what two sets of rules log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl360.bus import events as ev
from rl360.config import ConfigError
from rl360.launch.journal_files import open_source
from rl360.replay.decide import decide_step
from rl360.replay.effects import Effects, effects
from rl360.replay.facts import ReplayError, StepFacts, facts_of
from rl360.replay.reproduce import reproduce
from rl360.replay.rules import ReplayRules, read_rules


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One step under the recorded rules and under others."""

    step: int
    checked: int
    differences: tuple[str, ...]
    requested: int
    infra: int
    recorded: Effects
    other: Effects | None


def replay_steps(path: Path, *, with_: str, overrides: Sequence[str], as_json: bool, picture: Path | None) -> int:
    """Print a line for each trained step. 1: a recorded decision comes out differently somewhere."""
    rows = asyncio.run(_rows(path, with_, overrides))
    if not rows:
        raise ConfigError(f"{path}: no step is trained yet")
    name = with_ or "changed"
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode())
    else:
        print(*_lines(rows, name), sep="\n")
    if picture is not None:
        _draw(rows, name, picture)
        print(f"picture: {picture}")
    return 1 if any(r.differences for r in rows) else 0


async def _rows(path: Path, with_: str, overrides: Sequence[str]) -> list[Row]:
    return [_row(facts, with_, overrides) async for facts in _steps(path)]


async def _steps(path: Path) -> AsyncIterator[StepFacts]:
    """Facts of each trained step, one after another."""
    async with open_source(path) as source:
        records = await source.records()
        steps = sorted({r.event.step for r in records if isinstance(r.event, ev.StepTrained)})
        held = None if source.steps is None else set(source.steps)
        for step in steps:
            if held is None or step in held:
                yield facts_of([r for r in records if r.event.step in (-1, step - 1, step)], step)


def _row(facts: StepFacts, with_: str, overrides: Sequence[str]) -> Row:
    try:
        made = reproduce(facts)
    except ReplayError as e:
        raise ConfigError(str(e)) from None
    metrics = facts.tally.metrics()
    rules = read_rules(ReplayRules.of(facts.config), with_, overrides) if with_ or overrides else None
    return Row(
        step=facts.step,
        checked=made.checked,
        differences=tuple(map(str, made.differences)),
        requested=metrics.requested,
        infra=metrics.infra_total,
        recorded=effects(made.decision, made.decision),
        other=None if rules is None else effects(decide_step(facts, rules), made.decision),
    )


def _lines(rows: Sequence[Row], name: str) -> Iterator[str]:
    other = any(r.other for r in rows)
    head = f"{'step':>4}  {'decisions':>16}  {'infra':>9}  {'reward':>14}"
    yield head + (f"  {name + ':':>8} {'gradient':>9} {'advantages':>10} {'logged mean':>15}" if other else "")
    for row in rows:
        told = f"{len(row.differences)} of {row.checked} differ" if row.differences else f"{row.checked} the same"
        line = f"{row.step:4d}  {told:>16}  {row.infra:4d}/{row.requested:<4d}  {_logged(row.recorded):>14}"
        if row.other is not None:
            scale, shift = row.other.gradient_scale, row.other.advantage_shift
            told_scale = "-" if scale is None else f"× {scale:.3f}"
            told_shift = "-" if shift is None else f"{shift if abs(shift) >= 5e-4 else 0.0:+.3f}"
            line += f"  {'':>8} {told_scale:>9} {told_shift:>10} {_logged(row.other):>15}"
        yield line
    yield from (f"step {r.step}: {r.differences[0]}" for r in rows if r.differences)


def _logged(e: Effects) -> str:
    return f"- (n={e.logged_n})" if e.logged_mean is None else f"{e.logged_mean:.3f} (n={e.logged_n})"


def _draw(rows: Sequence[Row], name: str, path: Path) -> None:
    """Reward as either set of rules logs it, with n; what the other does to the gradient; the infra rate."""
    try:
        import matplotlib
    except ModuleNotFoundError as e:
        from rl360.extras import MissingExtra

        raise MissingExtra("--picture", e.name or "matplotlib", "laptop") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [r.step for r in rows]
    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(8, 6.5), height_ratios=(3, 1.2, 1), sharex=True, layout="constrained")
    top.plot(steps, [r.recorded.logged_mean for r in rows], color="#0f766e", marker="o", ms=3, label="reward/valid_mean")
    top.plot(steps, [r.recorded.kept_mean for r in rows], color="#0f766e", ls=":", marker="o", ms=3, label="reward/kept_mean")
    others = [r.other for r in rows if r.other is not None]
    theirs: dict[str, Any] = {"color": "#be123c", "ls": "--", "marker": "o", "ms": 3}
    if others:
        top.plot(steps, [o.logged_mean for o in others], label=f"mean as {name} rules log it", **theirs)
        middle.plot(steps, [o.gradient_scale for o in others], label=f"gradient scale, {name}", **theirs)
        middle.plot(
            steps, [o.advantage_shift for o in others], color="#b45309", ls="-.", marker="o", ms=3, label=f"advantage shift, {name}"
        )
    middle.plot(steps, [r.recorded.gradient_scale for r in rows], color="#0f766e", label="gradient scale, recorded")
    for row in rows:
        if row.infra and row.recorded.logged_mean is not None:
            top.annotate(f"n={row.recorded.logged_n}", (row.step, row.recorded.logged_mean), (0, 6), textcoords="offset points", fontsize=7)
    bottom.bar(steps, [r.infra / r.requested for r in rows], color="#f43f5e", width=0.6)
    for axis, label in ((top, "reward"), (middle, "rules"), (bottom, "infra rate")):
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    top.set_ylim(0, 1)
    bottom.set_xlabel("step")
    top.legend(fontsize=8, frameon=False, loc="lower right")
    middle.legend(fontsize=7, frameon=False)
    figure.savefig(path)  # pyright: ignore[reportUnknownMemberType]
    pyplot.close(figure)
