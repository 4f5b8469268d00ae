"""What a run came to: a few lines, and the reward picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rl360.dash.fold import RunView, StepView


def lines(view: RunView, path: Path) -> list[str]:
    """The summary that `rl360 run` ends with."""
    steps = [s for s in view.finished_steps() if s.metrics.valid.n]
    if not steps:
        return [f"no step was finished; logs: {path / 'logs'}"]
    first, last = steps[0], steps[-1]
    out = [
        "",
        f"{len(steps)} steps, {sum(len(s.stages) for s in steps)} attempts, version {max(view.version, 0)}, "
        f"{(view.last - view.started) if view.started else 0:.0f} s",
        f"reward/valid_mean  {_value(first)} -> {_value(last)}",
    ]
    evals = view.evals()
    if len(evals) > 1:
        out.append(f"eval/valid_mean    {_value(evals[0])} -> {_value(evals[-1])}  (held-out tasks)")
    infra = sum((Counter(s.metrics.infra) for s in steps), start=Counter[str]())
    out.append(f"infra              {infra.total()} of {sum(len(s.stages) for s in steps)} attempts {dict(infra) or ''}".rstrip())
    if faults := Counter(kind for s in view.steps.values() for kind in s.faults.values()):
        out.append(f"faults on cue      {faults.total()} {dict(faults)} (the recipe's plan, not an outage)")
    trained = [s.trained for s in steps if s.trained and not s.trained.skipped]
    if trained:
        worst = max(t.metrics.get("logp/delta_max", 0.0) for t in trained)
        mean = sum(t.metrics.get("logp/delta_mean", 0.0) for t in trained) / len(trained)
        out.append(f"|Δ log p|          mean {mean:.1e}, max {worst:.1e} (trainer against sampler)")
    prompt = sum(s.metrics.prompt_tokens for s in steps)
    if prompt:
        hit = sum(s.metrics.cached_tokens for s in steps) / prompt
        best = sum(s.metrics.best_cached for s in steps) / prompt
        out.append(f"prefix cache       {hit:.1%} of prompt tokens, best possible {best:.1%}")
    out += [f"journal lost its end  from {r.lost} to {r.kept} {' '.join(r.checkpoints)}".rstrip() for r in view.rewound]
    out += [f"limit not enforced {limit} on {node}: {why}" for (node, limit), why in sorted(view.unenforced.items())]
    if view.restarts:
        out.append("restarts           " + ", ".join(f"{w} {n}" for w, n in view.restarts.items()))
    out += [
        f"audit it:          rl360 audit {path}",
        f"follow one:        rl360 trace {path} {next(iter(last.stages), 'ATTEMPT')}",
        f"logs:              {path / 'logs'}",
    ]
    return out


def _value(step: StepView) -> str:
    mean = step.metrics.valid
    return f"{mean.value or 0.0:.3f} (n={mean.n}, step {step.step})"


def draw(runs: Sequence[tuple[str, RunView]], path: Path) -> bool:
    """Draw reward lines of one or more runs; False when matplotlib is not installed (it is an extra)."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 5), height_ratios=(3, 1), sharex=True, layout="constrained")
    colours = ("#c2410c", "#0f766e", "#1d4ed8", "#7c3aed")
    for (name, view), colour in zip(runs, colours, strict=False):
        steps = [s for s in view.finished_steps() if s.metrics.valid.n]
        xs = [s.step for s in steps]
        label = f"{name}: " if len(runs) > 1 else ""
        top.plot(xs, [s.metrics.valid.value for s in steps], color=colour, label=f"{label}reward/valid_mean")
        kept = [s for s in steps if s.metrics.kept.n]
        top.plot([s.step for s in kept], [s.metrics.kept.value for s in kept], color=colour, lw=1, ls=":", label=f"{label}reward/kept_mean")
        held = [s for s in view.evals() if s.metrics.valid.n]
        top.plot([s.step for s in held], [s.metrics.valid.value for s in held], "o", color=colour, ms=5, label=f"{label}eval/valid_mean")
        bottom.plot(xs, [s.metrics.infra_total / max(1, s.metrics.requested) for s in steps], color=colour, lw=1)
    top.set_ylim(0, 1)
    top.set_ylabel("reward")
    top.grid(alpha=0.25)
    top.legend(fontsize=8, frameon=False, loc="lower right")
    bottom.set_ylabel("infra rate")
    bottom.set_xlabel("step")
    bottom.set_ylim(bottom=0)
    bottom.grid(alpha=0.25)
    figure.savefig(path)  # pyright: ignore[reportUnknownMemberType]
    pyplot.close(figure)
    return True
