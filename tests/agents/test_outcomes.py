"""S13: every failure is typed where the information exists; the first cause is kept; an unknown one is loud and no 0."""

from __future__ import annotations

import asyncio
import doctest
import errno
import logging

import pytest

from rl360.agents import outcomes
from rl360.agents.outcomes import InfraError, Teardown, boundary, cause_of, typed
from rl360.bus.events import Boundary, Cause, InfraFailed


def test_the_examples_run() -> None:
    assert doctest.testmod(outcomes).failed == 0


def test_s12_an_infrastructure_outcome_has_no_reward_field() -> None:
    assert "reward" not in InfraFailed.__struct_fields__


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "full"), Cause.DISK_FULL),
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (ConnectionRefusedError(), Cause.REFUSED),
        (ConnectionResetError(), Cause.LOST),
        (asyncio.IncompleteReadError(b"", 1), Cause.LOST),
        (asyncio.CancelledError(), Cause.CANCELLED),
        (ZeroDivisionError(), Cause.UNKNOWN),
    ],
)
def test_s13_raw_exceptions_have_causes(error: BaseException, cause: Cause) -> None:
    assert cause_of(error) is cause


def test_s13_a_clients_timeout_is_a_lost_peer_and_not_the_phases_clock() -> None:
    """A socket's TimeoutError inside a sandbox client must not pass for the agent's budget (CASES 1)."""
    assert cause_of(TimeoutError()) is Cause.LOST


def test_s13_the_first_cause_is_kept_through_outer_boundaries() -> None:
    with pytest.raises(InfraError) as caught, boundary(Boundary.AGENT), boundary(Boundary.SANDBOX):
        raise ConnectionResetError("gone")
    assert (caught.value.boundary, caught.value.cause, caught.value.exception) == (Boundary.SANDBOX, Cause.LOST, "ConnectionResetError")


async def test_cancellation_is_no_outcome() -> None:
    with pytest.raises(asyncio.CancelledError), boundary(Boundary.AGENT):
        raise asyncio.CancelledError


def test_s13_an_unknown_exception_is_counted_loudly(caplog: pytest.LogCaptureFixture) -> None:
    error = typed(Boundary.VERIFIER, KeyError("surprise"))
    assert (error.boundary, error.cause, error.exception) == (Boundary.VERIFIER, Cause.UNKNOWN, "KeyError")
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_s13_teardown_errors_are_noted_and_every_step_runs() -> None:
    teardown, ran = Teardown(), []
    for name in ("sandbox", "session"):
        with teardown.step(name):
            ran.append(name)
            raise OSError(f"{name} is stuck")
    assert ran == ["sandbox", "session"]
    assert "sandbox is stuck" in teardown.errors
    assert "session is stuck" in teardown.errors
