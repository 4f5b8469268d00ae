"""The live table of `rl360 run`, and its plain lines when the screen is not a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rl360.bus import events as ev
from rl360.dash.fold import RunView, Stage, StepView
from rl360.trainer.metrics import Mean

_COLOURS = {
    Stage.REQUESTED: "grey37",
    Stage.ADMITTED: "grey58",
    Stage.SETUP: "yellow",
    Stage.AGENT: "cyan",
    Stage.VERIFY: "blue",
    Stage.VERIFIED: "green",
    Stage.DECIDED: "green",
    Stage.INFRA: "magenta",
}
_ORDER = (Stage.DECIDED, Stage.VERIFIED, Stage.INFRA, Stage.VERIFY, Stage.AGENT, Stage.SETUP, Stage.ADMITTED, Stage.REQUESTED)
_BAR = 40
_ROWS = 12


def render(view: RunView, now: float) -> Group:
    """Everything the terminal shows, as one rich renderable."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for name, justify in (
        ("step", "right"),
        ("attempts", "left"),
        ("valid", "right"),
        ("kept", "right"),
        ("infra", "left"),
        ("cache", "right"),
        ("Δlogp max", "right"),
        ("push", "right"),
        ("s", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    for step in view.train_steps()[-_ROWS:]:
        table.add_row(str(step.step), bar(step), *_cells(step, now))
    return Group(_head(view, now), table, _foot(view))


def bar(step: StepView) -> Text:
    """Every attempt's phase as one bar, longest-finished first."""
    text, total, counts = Text(), max(1, len(step.stages)), step.counts
    drawn = seen = 0
    for stage in _ORDER:
        seen += counts[stage]
        cells = round(_BAR * seen / total) - drawn
        text.append("█" * cells, style=_COLOURS[stage])
        drawn += cells
    return text


def _cells(step: StepView, now: float) -> list[str]:
    m, hit, trained, push = step.metrics, step.cache_hit, step.trained, step.push
    return [
        _mean(m.valid),
        _mean(m.kept),
        " ".join([f"{cause}:{n}" for cause, n in m.infra.items()] + [f"on cue:{n}" for n in [len(step.faults)] if n]),
        f"{hit[0]:.1%} of {hit[1]:.1%}" if hit else "",
        "skipped" if trained and trained.skipped else f"{trained.metrics.get('logp/delta_max', 0):.1e}" if trained else "",
        f"{push.path} {push.seconds:.2f}" if push else "",
        f"{(step.closed_at or now) - step.opened_at:.0f}",
    ]


def _head(view: RunView, now: float) -> Text:
    elapsed = now - view.started if view.started else 0.0
    engines = ", ".join(f"{g} {s}" for g, s in view.engines.items() if s not in ("lost", "fenced")) or "no engine yet"
    return Text(f"{view.run}  {elapsed:.0f} s  version {max(view.version, 0)}  {engines}", style="bold")


def _foot(view: RunView) -> Text:
    parts = [f"eval {s.step}: {_mean(s.metrics.valid)}" for s in view.evals()]
    if view.restarts:
        parts.append("restarts " + ", ".join(f"{w}:{n}" for w, n in view.restarts.items()))
    if view.late:
        parts.append(f"late outcomes {view.late}")
    return Text("   ".join(parts[-6:]), style="dim")


class PlainLines:
    """One line when a step is trained and one when an evaluation ends; for logs and pipes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: set[tuple[ev.Purpose, int]] = set()

    def update(self, view: RunView, now: float, *, over: bool = False) -> None:
        """Tell what is new. A trained step is told with its push, or without when the run is `over`."""
        for key, step in view.steps.items():
            if key not in self._told and _complete(step, over):
                self._told.add(key)
                self._say(line(step, now))


def _complete(step: StepView, over: bool) -> bool:
    if step.purpose is ev.Purpose.EVAL:
        return step.tally.complete
    if over:
        return step.finished
    return step.closed_at is not None and (step.push is not None or (step.trained is not None and step.trained.skipped))


def line(step: StepView, now: float) -> str:
    """A step in one line."""
    m = step.metrics
    if step.purpose is ev.Purpose.EVAL:
        return f"eval {step.step:3d}  eval/valid_mean {_mean(m.valid)} version {step.opened.version}"
    infra = f" ({', '.join(f'{k} {n}' for k, n in m.infra.items())})" if m.infra else ""
    parts = [f"step {step.step:3d}", f"reward/valid_mean {_mean(m.valid)}", f"kept_mean {_mean(m.kept)}", f"infra {m.infra_total}{infra}"]
    if step.faults:
        parts.append(f"faults on cue {len(step.faults)}")
    if hit := step.cache_hit:
        parts.append(f"cache {hit[0]:.1%} of {hit[1]:.1%}")
    if trained := step.trained:
        if trained.skipped:
            parts.append(f"skipped: {trained.why}")
        else:
            delta = trained.metrics.get("logp/delta_max", 0.0)
            parts.append(f"loss {trained.loss:+.4f} grad {trained.grad_norm:.3f} |Δlogp| max {delta:.1e}")
    if push := step.push:
        parts.append(f"push {push.path} {push.seconds:.2f} s")
    parts.append(f"{(step.closed_at or now) - step.opened_at:.1f} s")
    return "  ".join(parts)


def _mean(mean: Mean) -> str:
    """A mean with its denominator (S23)."""
    return f"{mean.value:.3f} n={mean.n}" if mean.value is not None else "-"
