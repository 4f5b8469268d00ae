"""What a replay may change: the rules of the recipe, and the habits of older systems under the names they are known by. Pure.

The presets `miles` and `slime` state what those systems do with failed attempts, as the public code and issues describe it:

    miles   groups are filtered over valid attempts; failed ones stay in the batch at weight 0, counted at reward 0 by the baseline
            (of the whole batch unless no group was dropped) and by the divisor of the sample mean
    slime   failed attempts are answers of reward 0 to the filter as well (slime#1414 for the baseline)
    legacy  miles, the rules of the step-70 arithmetic
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from rl360.config import Config, ConfigError, Section, convert, override, read_toml
from rl360.trainer.groups import Policing, Rules
from rl360.trainer.reduction import Reduction

RECORDED: Final = "recorded"


class ReplayRules(Section, frozen=True, kw_only=True):
    """Rules of one decision. The first five are a recipe's; the next four can only be changed in a replay (S18 to S20 fix them)."""

    agent_timeout: Policing = "verify"  # S14
    truncation: Policing = "verify"  # S14
    format_error_penalty: Annotated[float, Meta(ge=0)] = 0.0
    advantage_std: bool = False  # S19
    max_staleness: Annotated[int, Meta(ge=0)] = 1  # S24
    filter: Literal["valid", "failures_as_zero", "off"] = "valid"  # S18: whose rewards must disagree
    baseline: Literal["group", "batch", "batch_unless_full"] = "group"  # S19; full: no group was dropped
    failures_in_baseline: Literal["out", "zero"] = "out"  # S19: masked attempts of kept groups
    failures_in_divisor: Literal["out", "counted"] = "out"  # S20
    loss_reduction: Reduction = "token_mean"  # S20
    loss_constant: Annotated[float, Meta(ge=0)] = 0.0
    eps_low: Annotated[float, Meta(ge=0)] = 0.2  # S22, seen by the gradient alone, as are the next three
    eps_high: Annotated[float, Meta(ge=0)] = 0.28
    tis_cap: Annotated[float, Meta(gt=0)] = 2.0
    tis_floor: Annotated[float, Meta(ge=0)] = 0.0

    @staticmethod
    def of(config: Config) -> ReplayRules:
        """The recipe's own."""
        group, trainer = Rules.of(config), config.trainer
        return ReplayRules(
            agent_timeout=group.agent_timeout,
            truncation=group.truncation,
            format_error_penalty=group.format_error_penalty,
            advantage_std=group.advantage_std,
            max_staleness=group.max_staleness,
            loss_reduction=trainer.loss_reduction,
            loss_constant=trainer.loss_constant,
            eps_low=trainer.eps_low,
            eps_high=trainer.eps_high,
            tis_cap=trainer.tis_cap,
            tis_floor=trainer.tis_floor,
        )

    @property
    def group(self) -> Rules:
        """The part that the group filter knows."""
        return Rules(
            agent_timeout=self.agent_timeout,
            truncation=self.truncation,
            format_error_penalty=self.format_error_penalty,
            advantage_std=self.advantage_std,
            max_staleness=self.max_staleness,
        )

    @property
    def sound(self) -> bool:
        """One valid set feeds everything (S18 to S20)."""
        return (self.filter, self.baseline, self.failures_in_baseline, self.failures_in_divisor) == ("valid", "group", "out", "out")

    def changes(self, other: ReplayRules) -> dict[str, tuple[Any, Any]]:
        """What `other` says differently: name -> (here, there)."""
        pairs = ((n, getattr(self, n), getattr(other, n)) for n in self.__struct_fields__)
        return {n: (a, b) for n, a, b in pairs if a != b}


_MILES: Final[Mapping[str, Any]] = {
    "baseline": "batch_unless_full",
    "failures_in_baseline": "zero",
    "failures_in_divisor": "counted",
    "loss_reduction": "sample_mean",
    "loss_constant": 0.0,
}
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    RECORDED: {},
    "rl360": {"filter": "valid", "baseline": "group", "failures_in_baseline": "out", "failures_in_divisor": "out"},
    "miles": _MILES,
    "slime": {**_MILES, "filter": "failures_as_zero"},
    "legacy": _MILES,
}
"""What each preset sets on top of the recorded rules."""


def preset(recorded: ReplayRules, name: str) -> ReplayRules:
    """A named set of rules. Raises KeyError."""
    return msgspec.structs.replace(recorded, **PRESETS[name])


def read_rules(recorded: ReplayRules, with_: str, overrides: Sequence[str]) -> ReplayRules:
    """Recorded rules, then the preset or TOML file `with_` ("" for neither), then `key=value` overrides.

    A file may name the preset it starts from (`preset = "miles"`). Raises ConfigError naming the key and the valid ones.
    """
    where = f"--with {with_}" if with_ else "--set"
    data: dict[str, Any] = {}
    if with_ in PRESETS:
        data = dict(PRESETS[with_])
    elif with_:
        known = f"give a TOML file of rules ({', '.join(ReplayRules.__struct_fields__)}), or one of {', '.join(PRESETS)}"
        data = read_toml(Path(with_), where, known)
        name = data.pop("preset", RECORDED)
        if name not in PRESETS:
            raise ConfigError(f"{where}: preset {name!r} is unknown; known: {', '.join(PRESETS)}")
        data = {**PRESETS[name], **data}
    for item in overrides:
        override(data, item)
    rules = convert({**msgspec.to_builtins(recorded), **data}, ReplayRules, where)
    if rules.loss_reduction == "constant" and not rules.loss_constant:
        raise ConfigError(f'{where}: loss_reduction = "constant" needs loss_constant above 0')
    return rules
