"""Whom a recipe's faults strike. Pure: the same recipe and seed strike the same attempts, in every life and every replay.

Not covered: the striking itself (`sandbox/faulty.py` for attempts, `launch/engine_faults.py` for engines).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import blake3

from rl360.config import Fault

_BITS: Final = 64


def strikes(number: int, fault: Fault, *, seed: int, name: str) -> bool:
    """Whether fault `number` of the plan strikes the attempt or engine `name`: a share `fraction` of all names.

    >>> hit = [strikes(0, Fault(step=5, kind="sandbox_kill", fraction=0.4), seed=0, name=f"t5-g000-a{i}") for i in range(1000)]
    >>> 360 < sum(hit) < 440
    True
    """
    digest = blake3.blake3(f"fault/{seed}/{number}/{fault.step}/{name}".encode()).digest(_BITS // 8)
    return int.from_bytes(digest) < fault.fraction * 2**_BITS


def of_attempt(plan: Sequence[Fault], *, seed: int, step: int, attempt: str, domain: str) -> int | None:
    """Place in the plan of the fault that strikes an attempt of a training step: the first one that does; None: no fault."""
    for number, fault in enumerate(plan):
        if fault.of_engines or fault.step != step or fault.domain not in ("", domain):
            continue
        if strikes(number, fault, seed=seed, name=attempt):
            return number
    return None


def warning(plan: Sequence[Fault]) -> str:
    """What a run with a fault plan says when it starts.

    >>> warning([Fault(step=5, kind="sandbox_kill", fraction=0.25, domain="fix")])
    'warning: the recipe has a fault plan; what fails by it fails on purpose (FaultInjected): step 5 sandbox_kill 25% of fix'
    """
    parts = [f"step {f.step} {f.kind} {f.fraction:.0%}" + (f" of {f.domain}" if f.domain else "") for f in plan]
    return "warning: the recipe has a fault plan; what fails by it fails on purpose (FaultInjected): " + ", ".join(parts)
