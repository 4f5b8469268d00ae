"""A reproduction and a comparison as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rl360.replay.compare import Comparison, Measured
from rl360.replay.reproduce import Reproduction
from rl360.replay.text import rules_table

_SHOWN: Final = 10
_NAME: Final = 22
_SIDE: Final = 16


def reproduction_lines(step: int, made: Reproduction) -> Iterator[str]:
    if not made.differences:
        yield f"step {step}: all {made.checked} recorded decisions reproduced, bit for bit"
        return
    yield f"step {step}: {len(made.differences)} of {made.checked} recorded decisions come out differently; the first:"
    yield from (f"  {d}" for d in made.differences[:_SHOWN])


def comparison_lines(c: Comparison) -> Iterator[str]:
    yield f"step {c.step}: {c.names[0]} rules | {c.names[1]}"
    yield from (f"  {name}: {a} | {b}" for name, (a, b) in c.changed.items())
    if not c.changed:
        yield "  the same rules"
    yield ""
    yield f"{'':<{_NAME}}{c.names[0]:>{_SIDE}}{c.names[1]:>{_SIDE}}"
    yield _side("groups kept", *c.groups_kept)
    yield _side("samples trained", *c.samples)
    yield _side("tokens trained", *c.tokens)
    yield _side("divisor", *(f"{d:g}" for d in c.divisors))
    if c.measured is not None:
        yield _side("gradient norm", *(f"{n:.4g}" for n in c.measured.norms))
    yield from _changes(c)
    yield ""
    yield from rules_table(dict(zip(c.names, c.effects, strict=True)))


def _changes(c: Comparison) -> Iterator[str]:
    for name, only in zip(c.names, c.only, strict=True):
        if only:
            yield f"kept under {name} alone: groups {', '.join(map(str, only))}"
    if c.advantage_change_mean is not None:
        yield f"advantages change by {c.advantage_change_mean:+.4f} in the mean, at most {c.advantage_change_max:.4f}"
    if c.norm_ratio is not None:
        yield f"token coefficients: norm × {c.norm_ratio:.4f}, cosine {_value(c.cosine)}"
    if c.measured is not None:
        yield measured_line(c.measured)
    yield from _fates(c)


def measured_line(m: Measured) -> str:
    recorded = "" if m.recorded_norm is None else f"; the step recorded {m.recorded_norm:.6g}, measured again {m.norms[0]:.6g}"
    ratio = "-" if m.ratio is None else f"{m.ratio:.4f}"
    return f"real gradient ({m.checkpoint}, {m.seconds:.1f} s): norm × {ratio}, cosine {_value(m.cosine)}{recorded}"


def _fates(c: Comparison) -> Iterator[str]:
    if c.fates:
        yield f"{len(c.fates)} attempts have another fate:"
        yield from (f"  {f.attempt}: {f.before} | {f.after}" for f in c.fates[:_SHOWN])
        if len(c.fates) > _SHOWN:
            yield f"  … and {len(c.fates) - _SHOWN} more (--json lists all)"


def _side(name: str, *values: object) -> str:
    shown: Sequence[str] = [str(v) for v in values]
    return f"{name:<{_NAME}}" + "".join(f"{v:>{_SIDE}}" for v in shown)


def _value(number: float | None) -> str:
    return "-" if number is None else f"{number:.4f}"
