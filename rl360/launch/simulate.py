"""`rl360 simulate sandboxes`: eight ways to start the same sandboxes on the same nodes, side by side."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from rl360.agents.simulate.fleet import simulate
from rl360.agents.simulate.world import Scheme, Tally, World
from rl360.config import convert, override


class Row(msgspec.Struct, frozen=True, kw_only=True):
    scheme: Scheme
    tally: Tally


class Table(msgspec.Struct, frozen=True, kw_only=True):
    assumed: World
    seed: int
    rows: list[Row]


def simulate_sandboxes(given: dict[str, Any], overrides: tuple[str, ...], seed: int, *, as_json: bool) -> int:
    """Print the table, or all of it as JSON. Raises ConfigError."""
    table = compare(read_world(given, overrides), seed)
    print(msgspec.json.encode(table).decode() if as_json else "\n".join(_text(table)))
    return 0


def read_world(given: dict[str, Any], overrides: tuple[str, ...]) -> World:
    """The default world with what was `given` and `overrides` on top. Each node pulls one image at a time, if nothing else is said."""
    data: dict[str, Any] = {"waves": msgspec.to_builtins(World().waves), **given}
    data["waves"]["max_pulls"] = given.get("nodes", World().nodes)
    for item in overrides:
        override(data, item)
    return convert(data, World, "simulate sandboxes").check()


def compare(world: World, seed: int) -> Table:
    """Every scheme in the same world, each with the same seed."""
    schemes = [Scheme(waves=w, pinned=p, reserved=r) for w, p, r in itertools.product((False, True), repeat=3)]
    rows = [Row(scheme=scheme, tally=simulate(world, scheme, random.Random(seed).random)) for scheme in schemes]
    return Table(assumed=world, seed=seed, rows=rows)


_COLUMNS = {"pulls": 7, "at peak": 7, "TB": 6, "no image": 8, "killed": 6, "first": 6, "half": 6, "last": 6, "hours lost": 10}
_HEAD = f"{'admitted':<9} {'placed':<9} {'reserved':<8} " + " ".join(f"{name:>{width}}" for name, width in _COLUMNS.items())


def _text(table: Table) -> list[str]:
    lines = ["assumed (change with --set):"]
    lines += [f"  {line}" for line in _assumed(msgspec.to_builtins(table.assumed))]
    lines += [f"  seed = {table.seed}", "", _HEAD]
    lines += [_line(row) for row in table.rows]
    return [
        *lines,
        "",
        "no image: attempts that never got a sandbox, since each of their pulls timed out. killed: attempts whose node was out of memory.",
        "first, half, last: seconds until so many of all starts were ready. hours lost: tries that failed and work that was killed.",
    ]


def _assumed(data: dict[str, Any], section: str = "") -> Iterator[str]:
    """Each assumption as --set takes it."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _assumed(cast(dict[str, Any], value), f"{key}.")
        else:
            yield f"{section}{key}={value}"


def _line(row: Row) -> str:
    s, t = row.scheme, row.tally
    how = f"{'waves' if s.waves else 'at once':<9} {'pinned' if s.pinned else 'anywhere':<9} {'yes' if s.reserved else 'no':<8}"
    times = [_seconds(at) for at in (t.first_ready, t.half_ready, t.last_ready)]
    counts = [f"{t.pulls:,}", f"{t.pulls_peak:,}", f"{t.pulled_mb / 1e6:.2f}", f"{t.pull_failed:,}", f"{t.killed:,}"]
    values = [*counts, *times, f"{t.lost / 3600:,.1f}"]
    return how + " " + " ".join(f"{value:>{width}}" for value, width in zip(values, _COLUMNS.values(), strict=True))


def _seconds(at: float) -> str:
    return f"{at:,.0f}" if at else "never"
