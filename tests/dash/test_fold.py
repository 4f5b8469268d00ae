"""The view of a run is a fold: any prefix can be shown, and folding twice changes nothing."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.dash.fold import RunView, Stage
from rl360.dash.table import PlainLines, line, render
from rl360.launch import summary
from tests.launch.story import GOOD, LOST, records


def view(count: int | None = None) -> RunView:
    folded = RunView()
    for record in records()[:count]:
        folded.on(record)
    return folded


def test_stages_follow_the_attempts() -> None:
    step = view().steps[(ev.Purpose.TRAIN, 0)]
    assert step.stages == {GOOD: Stage.DECIDED, LOST: Stage.INFRA}
    assert view(7).steps[(ev.Purpose.TRAIN, 0)].stages[GOOD] is Stage.AGENT


def test_means_say_their_n_and_leave_infra_out_s23() -> None:
    metrics = view().steps[(ev.Purpose.TRAIN, 0)].metrics
    assert (metrics.valid.value, metrics.valid.n, metrics.kept.n) == (1.0, 1, 0)
    assert metrics.infra == {"sandbox/lost": 1}


def test_every_prefix_can_be_shown() -> None:
    console = Console(width=160, file=None, record=True)
    for count in range(len(records()) + 1):
        with console.capture():
            console.print(render(view(count), now=10.0))


def test_plain_line_is_told_once_and_says_why_a_step_was_skipped() -> None:
    said: list[str] = []
    lines = PlainLines(said.append)
    for _ in range(2):
        lines.update(view(), 10.0)
    assert said == [line(view().steps[(ev.Purpose.TRAIN, 0)], 10.0)]
    assert "skipped: no survivor" in said[0] and "sandbox/lost 1" in said[0] and "1.000 n=1" in said[0]


def test_a_limit_that_is_not_enforced_is_told_at_the_end() -> None:
    folded = view()
    for seq in (900, 901):  # a runner that was started again says it again
        folded.on(Recorded(seq, 11.0, ev.LimitNotEnforced(run="r", node="n/runner0", limit="disk", why="no loop devices")))
    said = [said for said in summary.lines(folded, Path("r")) if "not enforced" in said]
    assert said == ["limit not enforced disk on n/runner0: no loop devices"]


def test_a_step_counts_once_it_trained_and_not_while_it_goes_on() -> None:
    """A run that is interrupted tells a step whose push was still due, and no mean over half a step."""
    trained = next(n for n, r in enumerate(records(), 1) if isinstance(r.event, ev.StepTrained))
    said: list[str] = []
    PlainLines(said.append).update(view(trained - 1), 10.0, over=True)
    assert said == [] and summary.lines(view(trained - 1), Path("r"))[0].startswith("no step was finished")
    PlainLines(said.append).update(view(trained), 10.0, over=True)
    assert len(said) == 1 and summary.lines(view(trained), Path("r"))[1].startswith("1 steps")


def test_faults_on_cue_are_told_beside_what_failed_by_them() -> None:
    folded = view()
    injected = ev.FaultInjected(run="story", step=0, attempt=LOST, group=0, fault=0, kind="sandbox_kill", target=f"{LOST}.1")
    for _ in range(2):
        folded.on(Recorded(99, 10.0, injected))
    assert "faults on cue 1" in line(folded.steps[(ev.Purpose.TRAIN, 0)], 10.0)
    assert any("faults on cue      1 {'sandbox_kill': 1}" in text for text in summary.lines(folded, Path("r")))
