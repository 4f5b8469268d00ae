"""Failures become typed outcomes here (S13). Pure: exceptions in, (boundary, cause) out.

A failure is typed where the information exists: code that knows raises `InfraError` itself, anything else is typed by
the `boundary` that it crosses. The first cause is kept; an exception that nothing here knows stays `unknown`, loudly.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rl360.bus.events import Boundary, Cause, Phase

log = logging.getLogger(__name__)

DETAIL_LIMIT: Final = 2000
"""Characters of an error's text that the journal keeps."""

PHASE_BOUNDARY: Final[dict[Phase, Boundary]] = {
    Phase.QUEUE: Boundary.QUEUE,
    Phase.SETUP: Boundary.SANDBOX,
    Phase.AGENT: Boundary.AGENT,
    Phase.VERIFY: Boundary.VERIFIER,
    Phase.COLLECT: Boundary.COLLECT,
}
"""Where a phase's timeout is attributed (S15)."""

_ERRNO: Final[dict[int, Cause]] = {
    errno.ENOSPC: Cause.DISK_FULL,
    errno.EDQUOT: Cause.DISK_FULL,
    errno.ENOMEM: Cause.OUT_OF_MEMORY,
    errno.ECONNREFUSED: Cause.REFUSED,
    errno.ENOENT: Cause.LOST,
    errno.EIO: Cause.LOST,
}

_TYPES: Final[tuple[tuple[type[BaseException], Cause], ...]] = (
    (asyncio.CancelledError, Cause.CANCELLED),
    (MemoryError, Cause.OUT_OF_MEMORY),
    (ConnectionRefusedError, Cause.REFUSED),
    (ConnectionError, Cause.LOST),
    (EOFError, Cause.LOST),
    # A timeout that some client raised is a lost peer: `timeout` is kept for the clock of a phase (S15).
    (TimeoutError, Cause.LOST),
)


class InfraError(Exception):
    """An infrastructure failure with its place and cause. `exception` is the raw exception's name."""

    def __init__(self, boundary: Boundary, cause: Cause, detail: str, *, exception: str = "InfraError") -> None:
        super().__init__(f"{boundary.value}/{cause.value}: {detail}")
        self.boundary, self.cause, self.exception = boundary, cause, exception
        self.detail = detail[:DETAIL_LIMIT]


def cause_of(error: BaseException) -> Cause:
    """Cause of a raw exception; `unknown` for what isn't listed.

    >>> cause_of(OSError(errno.ENOSPC, "no space")), cause_of(KeyError("x"))
    (<Cause.DISK_FULL: 'disk_full'>, <Cause.UNKNOWN: 'unknown'>)
    """
    for kind, cause in _TYPES:
        if isinstance(error, kind):
            return cause
    if isinstance(error, OSError) and error.errno in _ERRNO:
        return _ERRNO[error.errno]
    return Cause.UNKNOWN


def typed(where: Boundary, error: BaseException) -> InfraError:
    """The typed form of an exception that crossed `where`; an `InfraError` keeps the place that it was born in."""
    if isinstance(error, InfraError):
        return error
    cause = cause_of(error)
    if cause is Cause.UNKNOWN:
        log.error("%s/unknown: %s: %s", where.value, type(error).__name__, error, exc_info=error)
    return InfraError(where, cause, str(error), exception=type(error).__name__)


def timed_out(phase: Phase, seconds: float) -> InfraError:
    """The clock of a phase ran out."""
    detail = f"the {phase.value} phase ran out of its {seconds:g} s"
    return InfraError(PHASE_BOUNDARY[phase], Cause.TIMEOUT, detail, exception="PhaseTimeout")


@contextmanager
def boundary(where: Boundary) -> Generator[None]:
    """Everything that fails inside leaves as an `InfraError` of this boundary; cancellation passes through."""
    try:
        yield
    except (InfraError, asyncio.CancelledError):
        raise
    except Exception as error:
        raise typed(where, error) from error


@dataclass
class Teardown:
    """Errors of taking things down. They are reported beside the outcome and never replace it (S13)."""

    errors: str = ""

    @contextmanager
    def step(self, what: str) -> Generator[None]:
        """Run one teardown step; what fails is noted, and the next step runs all the same."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (noted, and must not hide the attempt's own outcome)
            note = f"{what}: {type(error).__name__}: {error}"
            log.warning("teardown: %s", note)
            self.errors = f"{self.errors}; {note}".removeprefix("; ")[:DETAIL_LIMIT]
