"""Names on the bus: subjects, streams and deterministic message ids."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from rl360.bus import events as ev

ANY: Final = "*"
NONE: Final = "_"
"""Stands for a step or a group that an event doesn't have."""

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")


def check_run_name(run: str) -> str:
    """Return `run`, or raise ValueError: it becomes part of subjects, stream names and paths."""
    if not _RUN_NAME.fullmatch(run):
        raise ValueError(f"run name {run!r}: use 1-48 letters, digits, '-' or '_', starting with a letter or digit")
    return run


def stream(run: str) -> str:
    """The journal of a run."""
    return f"RL360_{run}"


def dead_letter_stream(run: str) -> str:
    return f"RL360_{run}_DLQ"


def lease_bucket(run: str) -> str:
    """KV bucket of a run's leases; its stream and subjects follow NATS' KV naming, so `nats kv` reads it."""
    return f"RL360_{run}_leases"


def lease_stream(run: str) -> str:
    return f"KV_{lease_bucket(run)}"


def lease_subject(run: str, key: str) -> str:
    return f"$KV.{lease_bucket(run)}.{key}"


def subject(event: ev.Event) -> str:
    """Subject of an event: `rl360.<run>.ev.<step>.<type>.<group>`."""
    group = getattr(event, "group", None)
    return pattern(
        event.run,
        step=step_token(event.step),
        type_=type(event).__name__,
        group=NONE if group is None else f"{group:03d}",
    )


class Name(NamedTuple):
    """What a subject says."""

    step: int  # -1: of no step
    type: str
    group: int | None


def parse(subject: str) -> Name:
    """Read a subject of a journal. Raises ValueError.

    >>> parse("rl360.demo.ev.3.GroupDecided.007")
    Name(step=3, type='GroupDecided', group=7)
    """
    try:
        _, _, _, step, type_, group = subject.split(".")
        return Name(-1 if step == NONE else int(step), type_, None if group == NONE else int(group))
    except ValueError:
        raise ValueError(f"{subject!r} is not a subject of a journal") from None


def step_token(step: int) -> str:
    """A step as a subject says it."""
    return NONE if step < 0 else str(step)


def pattern(run: str, *, step: str = ANY, type_: str = ANY, group: str = ANY) -> str:
    """Subject filter.

    >>> pattern("demo", step="3", type_="GroupDecided")
    'rl360.demo.ev.3.GroupDecided.*'
    """
    return f"rl360.{run}.ev.{step}.{type_}.{group}"


def run_of(subject: str) -> str:
    """The run in whose journal a subject lies.

    >>> run_of("rl360.demo.ev.3.GroupDecided.007")
    'demo'
    """
    return subject.split(".", 2)[1]


_IDENTITY: dict[str, tuple[str, ...]] = {
    "RunStarted": ("resumed",),
    "RunFinished": ("why", "steps", "resumed"),
    "StepOpened": ("purpose",),
    "StepClosed": ("purpose",),
    "RolloutRequested": ("attempt",),
    "RolloutAdmitted": ("attempt",),
    "RolloutPhase": ("session", "phase", "ended"),
    "SessionOpened": ("session",),
    "SessionClosed": ("session",),
    "TurnCompleted": ("session", "turn"),
    "RoutingDelta": ("session", "turn"),
    "VerifierResult": ("session",),
    "InfraFailed": ("session", "boundary", "attempt"),
    "TrajectoryMerged": ("session", "branch"),
    "GroupDecided": ("group", "purpose"),
    "StepTrained": (),
    "PlanBuilt": ("plan", "generations"),
    "WeightsPushed": ("version", "attempt"),
    "EngineJoined": ("generation",),
    "EngineReady": ("generation", "version"),
    "EngineLost": ("generation",),
    "EngineFenced": ("generation",),
    "WorkerRestarted": ("worker", "restarts", "resumed"),
    "LateOutcome": ("session", "kind"),
    "BlobsPruned": ("first", "last", "kept", "blobs", "checkpoints"),
    "FaultInjected": ("fault", "target"),
    "StartRetried": ("session", "tries"),
    "WorkerGivenUp": ("worker", "resumed"),
    "JournalRewound": ("kept", "resumed"),
    "LimitNotEnforced": ("node", "limit"),
}
"""Fields that, with run, step and type, say which event this is. A redelivered fold makes the same id again."""


def msg_id(event: ev.Event) -> str:
    """Deterministic `Nats-Msg-Id`: the server drops a second copy within its window, consumers fold idempotently beyond."""
    kind = type(event).__name__
    parts = [event.run, str(event.step), kind]
    for name in _IDENTITY[kind]:
        value: object = getattr(event, name)
        parts.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return "/".join(parts)
