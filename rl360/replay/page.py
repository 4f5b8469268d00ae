"""An explanation as one HTML file that works without a server, script or network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import jinja2

from rl360.replay.explain import Explanation

_TEMPLATE: Final = "explanation.html.jinja"
_FATES: Final = (
    ("reinforced", "trained, advantage above 0"),
    ("discouraged", "trained, advantage below 0"),
    ("trained", "trained, advantage 0"),
    ("passed", "passed, group dropped"),
    ("failed", "failed, group dropped"),
    ("infra", "lost to infrastructure"),
    ("masked", "masked by a rule"),
    ("stale", "too stale"),
    ("open", "not over"),
)


def render(explanation: Explanation) -> str:
    """The page. Everything that the journal says is escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": _number, "percent": _percent, "signed": _signed}
    template = environment.from_string((Path(__file__).parent / _TEMPLATE).read_text())
    seen = {fate for group in explanation.groups for fate in group.fates}
    return template.render(
        e=explanation,
        groups=sorted(explanation.groups, key=lambda g: (not g.kept, -g.share, g.group)),
        fates=[(name, text) for name, text in _FATES if name in seen],
        rows=max((g.attempts for g in explanation.groups), default=0),
        largest=max((g.share for g in explanation.groups), default=0.0),
    )


def _number(value: Any, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: Any) -> str:
    return "-" if value is None else f"{value:.1%}"


def _signed(value: Any) -> str:
    return "-" if value is None else f"{value if abs(value) >= 5e-4 else 0.0:+.3f}"
