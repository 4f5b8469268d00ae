"""Simulated starts: the bookkeeping is exact, and the shape is that of a cluster whose starts all came at once (CASES 41)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.agents.simulate.fleet import simulate
from rl360.agents.simulate.registry import Registry
from rl360.agents.simulate.world import Scheme, Tally, World
from rl360.cli import main
from rl360.config import Waves
from rl360.launch.simulate import read_world

SMALL: dict[str, Any] = {"starts": 1024, "nodes": 16, "images": 64, "registry_rate": 600.0}
"""An eighth of the default cluster; its registry serves 90 of these images before a pull times out."""
flags = st.builds(Scheme, waves=st.booleans(), pinned=st.booleans(), reserved=st.booleans())


def run(scheme: Scheme, **world: Any) -> Tally:
    return simulate(read_world({**SMALL, **world}, ()), scheme, random.Random(0).random)


@given(st.integers(1, 50), st.floats(10, 1000), st.floats(10, 1000), st.floats(1, 5000))
def test_pulls_share_the_registrys_rate_and_none_is_faster_than_its_node(pulls: int, rate: float, pull_rate: float, size: float) -> None:
    registry = Registry(rate, pull_rate, size)
    for pull in range(pulls):
        registry.begin(pull, 0.0)
    now = 0.0
    while due := registry.next():
        now, pull = due
        registry.end(pull, now)
    assert registry.served == pytest.approx(pulls * size)
    assert now == pytest.approx(max(pulls * size / rate, size / pull_rate))


def test_a_pull_that_begins_later_ends_later() -> None:
    registry = Registry(rate=10.0, pull_rate=10.0, size=100.0)
    registry.begin(0, 0.0)
    registry.begin(1, 5.0)  # 50 of pull 0 are there; each gets 5 a second from now on
    assert registry.next() == (15.0, 0)
    registry.end(0, 15.0)
    assert registry.next() == (20.0, 1)


@settings(max_examples=30, deadline=None)
@given(flags, st.integers(1, 60), st.integers(1, 5), st.integers(1, 60), st.integers(0, 2**16), st.floats(50, 5000))
def test_every_start_is_ready_or_failed_and_no_bound_is_ever_crossed(
    scheme: Scheme, starts: int, nodes: int, images: int, seed: int, registry: float
) -> None:
    world = World(
        starts=starts,
        nodes=nodes,
        images=min(images, starts),
        registry_rate=registry,
        spread=min(2, nodes),
        node_memory_mb=20 << 10,
        heavy=0.4,
        waves=Waves(size=7, interval=3.0, max_starting=20, max_pulls=nodes, tries=3),
    ).check()
    tally = simulate(world, scheme, random.Random(seed).random)
    assert tally.ready + tally.pull_failed == starts
    assert tally.killed <= tally.ready
    assert tally.pulled_mb <= tally.pulls * world.image_mb * 1.001
    if scheme.reserved:
        assert tally.killed == 0
        assert tally.node_memory_peak <= 1
    if scheme.waves:
        assert tally.pulls_peak <= nodes
    assert simulate(world, scheme, random.Random(seed).random) == tally


def test_at_once_every_pull_times_out_and_comes_back_and_in_waves_none_does() -> None:
    at_once = run(Scheme(waves=False, pinned=False, reserved=False))
    waves = run(Scheme(waves=True, pinned=False, reserved=False))
    assert (at_once.pulls_peak, at_once.ready, at_once.retries) == (1024, 0, 4 * 1024)
    assert (waves.pulls_peak, waves.ready, waves.retries) == (16, 1024, 0)
    assert at_once.lost > 1024 * 300


def test_pinned_images_are_pulled_where_they_are_and_nowhere_else() -> None:
    anywhere = run(Scheme(waves=True, pinned=False, reserved=False))
    pinned = run(Scheme(waves=True, pinned=True, reserved=False))
    assert pinned.pulls <= 64 * 2 < 6 * pinned.pulls < anywhere.pulls
    assert pinned.last_ready < anywhere.last_ready / 4


def test_a_reservation_costs_time_and_saves_the_neighbours() -> None:
    world = {"starts": 6, "nodes": 1, "images": 6, "heavy": 0.4, "node_memory_mb": 20 << 10, "spread": 1, "build": 400.0}
    shared = run(Scheme(waves=True, pinned=True, reserved=False), **world)
    reserved = run(Scheme(waves=True, pinned=True, reserved=True), **world)
    assert shared.killed > 0
    assert reserved.killed == 0
    assert reserved.last_ready > shared.last_ready


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_prints_what_it_assumes_and_a_row_a_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "sandboxes", "--starts", "64", "--nodes", "4", "--images", "8", "--registry-rate", "1000"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "  waves.max_pulls=4\n" in text
    assert main([*arguments, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["assumed"]["starts"] == 64
    rows = {(r["scheme"]["waves"], r["scheme"]["pinned"], r["scheme"]["reserved"]): r["tally"] for r in table["rows"]}
    assert len(rows) == 8
    assert all(t["ready"] == 64 for t in rows.values())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("image_gb=2", "unknown key 'image_gb'; did you mean image_mb?"),
        ("heavy=2", "heavy"),
        ("spread=5", "spread: 5 is more than there are nodes (4)"),
        ("waves.max_pulls=3", "waves.max_pulls: must be 0 or at least the number of nodes (4)"),
        ("heavy_memory_mb=300000", "a node must hold one sandbox"),
        ("images=65", "images: 65 are more than there are starts (64)"),
    ],
)
def test_what_can_not_be_is_refused_by_name(override: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "sandboxes", "--starts", "64", "--nodes", "4", "--images", "8", "--set", override]) == 2
    assert says in capsys.readouterr().err
