"""A step's events in a journal of their own: the server copies them, live workers can decide them again, the original stays as it is.

    rl360.tiny.ev.12.VerifierResult.003  ->  rl360.try.ev.12.VerifierResult.003

The copy keeps order, bodies and trace contexts; sequences start at 1. What the workers under test are to say again is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from rl360.bus import events as ev
from rl360.bus import selection, subjects
from rl360.bus.client import Bus
from rl360.bus.connection import BusError, JetStreamError, api, is_missing
from rl360.bus.journal import create_streams, last_seq, stop_copying

_POLL: Final = 0.02
_DEADLINE: Final = 60.0

CHAIN: Final[tuple[tuple[str, tuple[type[ev.Event], ...]], ...]] = (
    ("merger", (ev.TrajectoryMerged,)),
    ("filter", (ev.GroupDecided, ev.LateOutcome)),
    ("trainer", (ev.StepTrained, ev.WeightsPushed)),
    ("scheduler", (ev.StepClosed,)),
)
"""Who decides what about a step, in order: what one says depends on those above it."""


def left_out(before: str) -> frozenset[str]:
    """Types that a copy made for `before` lacks: what that worker and those after it say about the step. "": none.

    >>> sorted(left_out("trainer"))
    ['StepClosed', 'StepTrained', 'WeightsPushed']
    """
    names = [name for name, _ in CHAIN]
    later = CHAIN[names.index(before) :] if before else ()
    return frozenset(t.__name__ for _, types in later for t in types)


async def copy_step(bus: Bus, step: int, name: str, *, before: str = "") -> int:
    """Copy what `step` needs into the journal of `name`, which must be new; returns how many events it has.

    Raises BusError when the name is taken, the step is not in the journal, or the copy does not come to its end in 60 s.
    """
    wanted = _subjects(step, left_out(before))
    expected = await _count(bus, wanted)
    await _refuse_taken(bus, name)
    async for _ in bus.replay(types=[ev.StepOpened], step=step):
        break
    else:
        raise BusError(f"step {step} is not in the journal of {bus.run} (`rl360 journal ls` lists its steps)")
    transforms = [_transform(bus.run, name, *parts) for parts in wanted]
    source = {"name": subjects.stream(bus.run), "subject_transforms": transforms}
    await create_streams(bus.client, name, sources=[source])
    await _wait(bus, name, expected)
    await stop_copying(bus.client, name)
    return expected


def _subjects(step: int, without: frozenset[str]) -> list[tuple[str, str]]:
    """(step token, type) of everything to copy."""
    chosen: list[tuple[str, str]] = []
    for part in selection.parts([step]):
        types = part.types or tuple(ev.EVENT_TYPES)
        skipped = without if part.step == step else frozenset[str]()
        chosen += ((subjects.step_token(part.step), t) for t in types if t not in skipped)
    return chosen


def _transform(run: str, name: str, step: str, type_: str) -> dict[str, str]:
    return {
        "src": subjects.pattern(run, step=step, type_=type_),
        "dest": subjects.pattern(name, step=step, type_=type_, group="{{wildcard(1)}}"),
    }


async def _count(bus: Bus, wanted: Sequence[tuple[str, str]]) -> int:
    """How many events of the original match."""
    chosen, total = set(wanted), 0
    for step in {step for step, _ in wanted}:
        info = await api(bus.client, f"STREAM.INFO.{subjects.stream(bus.run)}", {"subjects_filter": subjects.pattern(bus.run, step=step)})
        held: dict[str, int] = info["state"].get("subjects") or {}
        total += sum(n for subject, n in held.items() if _key(subject) in chosen)
    return total


def _key(subject: str) -> tuple[str, str]:
    _, _, _, step, type_, _ = subject.split(".")
    return step, type_


async def _refuse_taken(bus: Bus, name: str) -> None:
    subjects.check_run_name(name)
    try:
        await api(bus.client, f"STREAM.INFO.{subjects.stream(name)}")
    except JetStreamError as e:
        if is_missing(e):
            return
        raise
    raise BusError(f"a journal named {name!r} is there already: choose another name for --into")


async def _wait(bus: Bus, name: str, expected: int) -> None:
    try:
        async with asyncio.timeout(_DEADLINE):
            while await last_seq(bus.client, subjects.stream(name)) < expected:  # noqa: ASYNC110  (the server copies: nothing to wait on)
                await asyncio.sleep(_POLL)
    except TimeoutError:
        raise BusError(f"the copy into {name!r} is not complete after {_DEADLINE:g} s: remove it and try again") from None
