"""An explanation and a comparison as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rl360.replay.effects import Effects
from rl360.replay.explain import Explanation, GroupRow

_WIDTH: Final = 16
_GLYPHS: Final = {
    "reinforced": "▲",
    "discouraged": "▽",
    "trained": "■",
    "passed": "+",
    "failed": "-",
    "masked": "m",
    "infra": "x",
    "stale": "s",
    "open": ".",
}


def lines(e: Explanation) -> Iterator[str]:
    """The first line is the worst alarm, or says that there is none."""
    yield f"ALARM  {e.alarms[0]}" if e.alarms else f"step {e.step} of {e.run}: nothing alarming"
    yield from (f"       {alarm}" for alarm in e.alarms[1:])
    yield ""
    yield from _journey(e)
    yield ""
    yield from _groups(e)
    if e.rules:
        yield ""
        yield from rules_table(e.rules)


def _journey(e: Explanation) -> Iterator[str]:
    c, t = e.counts, e.tokens
    yield _row("step", f"{e.step}, {e.state}{f': {e.why}' if e.why else ''}")
    yield _row("attempts", f"{c['requested']} requested: {c['valid']} valid, {c['masked']} masked ({c['infra']} infra), {c['stale']} stale")
    for lost in e.lost:
        where = "; ".join(
            f"{name} {_counts(counts)}"
            for name, counts in (("node", lost.nodes), ("engine", lost.generations), ("image", lost.images), ("as", lost.exceptions))
            if counts
        )
        yield _row("", f"{lost.n:4d} {lost.cause}  {where}".rstrip())
    yield _row("agents ended", _counts(e.agent_ends))
    yield _row("groups", f"{c['groups']}: {c['groups_kept']} kept" + "".join(f", {n} {reason}" for reason, n in e.dropped.items()))
    yield _row(
        "tokens",
        f"{t.sampled} sampled, {t.trained} trained, {t.stale} of them older than the weights; {t.truncated} attempts truncated, "
        f"{t.dropped_turns} turns dropped, {t.branches} branches, {t.format_errors} format errors",
    )
    if e.divisor is not None:
        yield _row("divisor", f"{e.divisor:g} ({e.reduction}) over {c['kept']} valid kept attempts")
    yield _row("rewards", f"valid {_mean(e, 'reward/valid_mean')}, kept {_mean(e, 'reward/kept_mean')}")
    yield _row("gradient by", ", ".join(f"{d} {s:.0%}" for d, s in e.domains.items() if s) or "nothing trained")
    yield _row("versions", ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in e.versions.items()))
    if "train/loss" in e.metrics:
        names = ("train/loss", "train/grad_norm", "train/tis", "train/clipped", "logp/delta_mean", "logp/delta_max")
        yield _row("training", ", ".join(f"{n.split('/')[1]} {e.metrics[n]:.3g}" for n in names if n in e.metrics))
    for push in e.pushes:
        ok = sum(v == "ok" for v in push.engines.values())
        yield _row(
            "push",
            f"version {push.version} {push.path}{f' ({push.why})' if push.why else ''}: {ok} of {len(push.engines)} engines, "
            f"{push.calls} calls, {push.bytes / 1e6:.1f} MB, {push.seconds:.2f} s, paused {push.pause_seconds:.2f} s",
        )
    yield _row("turns", _counts(e.turns))
    for what, events in e.engines.items():
        if events:
            yield _row(what, ", ".join(f"{name}{f' ({cause})' if cause else ''}" for name, cause in events.items()))


def _groups(e: Explanation) -> Iterator[str]:
    yield f"{'group':>5}  {'kept':<22} {'valid':>7}  {'mean':>5}  {'base':>5}  {'gradient':>8}  attempts  task"
    for row in sorted(e.groups, key=lambda r: (not r.kept, -r.share, r.group)):
        yield _group(row)
    yield "       " + "  ".join(f"{glyph} {fate}" for fate, glyph in _GLYPHS.items())


def _group(row: GroupRow) -> str:
    kept = "kept" if row.kept else row.reason
    glyphs = "".join(_GLYPHS[f] for f in row.fates)
    mean, base = _number(row.reward_mean), _number(row.baseline)
    share = f"{row.share:.1%}" if row.share else "-"
    return f"{row.group:5d}  {kept:<22} {row.valid:>3d}/{row.attempts:<3d}  {mean:>5}  {base:>5}  {share:>8}  {glyphs:<8}  {row.task}"


def rules_table(rules: Mapping[str, Effects]) -> Iterator[str]:
    """What each set of rules does to the step. `divisor`: what counting failures alone does to the gradient; `norm` and `cosine`: what
    all its rules together do to the tokens' coefficients, reduction and baseline included."""
    yield (
        f"{'rules':<{_WIDTH}}{'divisor':>10}{'advantages':>12}{'baseline':>10}{'norm':>9}{'cosine':>8}{'kept mean':>11}"
        f"{'logged mean':>16}{'tis logs':>10}"
    )
    for name, e in rules.items():
        shift = "-" if e.advantage_shift is None else f"{_positive_zero(e.advantage_shift):+.3f}"
        logged = f"{_number(e.logged_mean)} (n={e.logged_n})"
        yield (
            f"{name:<{_WIDTH}}{_times(e.gradient_scale):>10}{shift:>12}{_number(e.baseline):>10}{_times(e.norm_ratio):>9}"
            f"{_number(e.cosine):>8}{_number(e.kept_mean):>11}{logged:>16}{_number(e.tis_factor):>10}"
        )


def _times(value: float | None) -> str:
    return "-" if value is None else f"× {value:.3f}"


def _positive_zero(value: float) -> float:
    """No "-0.000" for a rounding error."""
    return 0.0 if abs(value) < 5e-4 else value


def _row(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}}{text}" if text else f"{name:<{_WIDTH}}-"


def _counts(counts: Mapping[str, int]) -> str:
    listed: Sequence[tuple[str, int]] = list(counts.items())
    return ", ".join(f"{name} {n}" for name, n in listed)


def _mean(e: Explanation, name: str) -> str:
    value = e.metrics.get(name)
    return "-" if value is None else f"{value:.3f} (n={e.metrics[f'{name}_n']:.0f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
