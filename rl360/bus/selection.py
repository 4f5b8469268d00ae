"""Which part of a journal some steps need: what explains, replays and audits them, and nothing else. Pure.

A step stands on the step before it: the version that it trains on, and which engines held that version. It stands on what
belongs to no step as well: the recipe, engines and plans, restarts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from rl360.bus import subjects

NO_STEP: Final = -1
_OF_THE_STEP_BEFORE: Final = ("StepTrained", "WeightsPushed")


class Part(msgspec.Struct, frozen=True):
    """Events of one step (`NO_STEP`: of none), of the named types; () is all."""

    step: int
    types: tuple[str, ...] = ()

    def has(self, type_: str) -> bool:
        return not self.types or type_ in self.types


def parts(steps: Collection[int]) -> tuple[Part, ...]:
    """What `steps` need, each part once.

    >>> [p.step for p in parts({3})]
    [-1, 2, 3]
    """
    wanted = {s for s in steps if s >= 0}
    before = {s - 1 for s in wanted if s} - wanted
    whole = (NO_STEP, *wanted)
    return tuple(sorted((*(Part(s) for s in whole), *(Part(s, _OF_THE_STEP_BEFORE) for s in before)), key=lambda p: p.step))


def filters(run: str, chosen: Collection[Part]) -> list[str]:
    """Subject filters of a server's consumer for these parts. They don't overlap."""
    return [subjects.pattern(run, step=subjects.step_token(p.step), type_=type_) for p in chosen for type_ in (p.types or (subjects.ANY,))]
