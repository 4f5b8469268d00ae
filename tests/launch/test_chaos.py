"""`rl360 chaos`: its moments are seeded, its check finds what it must, and a short one ends clean."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.config import Config
from rl360.launch.chaos import check, plan
from tests.launch.run_process import ROOT


def test_the_same_seed_strikes_the_same_and_every_kind_equally_often() -> None:
    first, again, other = (list(itertools.islice(plan.blows(seed, Config()), 400)) for seed in (1, 1, 2))
    assert first == again != other
    counts = Counter(b.target for b in first)
    single = [counts.pop(name) for name in plan.targets(Config())]
    assert max(single) - min(single) <= 1
    assert counts.keys() == {plan.WHOLE, plan.CRASH}
    assert {b.target for b in itertools.islice(plan.blows(1, Config(), "session"), 50)} == {"session0"}
    assert {b.anchor for b in first} == {t.__name__ for t in plan.ANCHORS}


def requested(attempt: str) -> ev.RolloutRequested:
    return ev.RolloutRequested(run="r", step=0, attempt=attempt, group=0, index=0, task="t", digest="d", budgets=BUDGETS)


def failed(attempt: str, life: int = 1) -> ev.InfraFailed:
    return ev.InfraFailed(
        run="r",
        step=0,
        attempt=attempt,
        group=0,
        session=ev.session_id(attempt, life),
        boundary=ev.Boundary.ENGINE,
        cause=ev.Cause.LOST,
        exception="X",
    )


def trained(step: int) -> ev.StepTrained:
    return ev.StepTrained(
        run="r",
        step=step,
        version=step + 1,
        samples=1,
        tokens=1,
        divisor=1.0,
        loss=0.0,
        grad_norm=0.0,
        metrics={},
        seconds={},
        checkpoint="",
    )


BUDGETS = ev.Budgets(queue=1.0, setup=1.0, agent=1.0, verify=1.0, collect=1.0, margin=1.0)
GOOD: list[ev.Event] = [requested("a"), requested("b"), failed("a"), failed("b", 2), trained(0), trained(1)]


def tally(events: list[ev.Event]) -> check.Tally:
    return check.tally([Recorded(seq=i + 1, time=0.0, event=e) for i, e in enumerate(events)], 2)


def test_what_is_whole_is_found_whole() -> None:
    found = tally(GOOD)
    assert found.wrong() == {}
    assert (found.attempts, found.later_lives, found.infra) == (2, 1, {"engine/lost": 2})


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ([e for e in GOOD if e != failed("a")], {"lost": ("a",)}),
        ([*GOOD, failed("a", 2)], {"double": ("a",)}),
        ([*GOOD, failed("c")], {"unasked": ("c",)}),
        (GOOD[:-1], {"missing_steps": (1,)}),
        ([*GOOD, trained(1)], {"double_steps": (1,)}),
    ],
)
def test_what_is_lost_or_done_twice_is_named(events: list[ev.Event], wrong: dict[str, tuple[object, ...]]) -> None:
    assert tally(events).wrong() == wrong


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_is_killed_in_parts_loses_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    argv = [sys.executable, "-m", "rl360", "chaos", str(ROOT / "recipes" / "chaos.toml"), "--kills", "4", "--seed", "3"]
    argv += ["--dir", str(tmp_path / "runs"), "--json", str(report), "--set", "run.steps=3"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert (found["kills"], found["lost"], found["double"], found["problems"]) == (4, 0, 0, 0)
    assert len(found["struck"]) == 4 and found["attempts"] >= 96
