"""A fault plan strikes whom it names, for real, and what comes of it is told by the usual classification (S13)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.agents import faults
from rl360.agents.harness import base
from rl360.bus.events import AgentEnd, Boundary, Cause, FaultInjected, InfraFailed, VerifierResult
from rl360.config import ConfigError, Fault, load, parse
from tests.agents.test_runner import SOLVE, Stage, quick, session, stage, task  # noqa: F401  (fixtures)

RECIPE = Path(__file__).parents[2] / "recipes" / "step70.toml"
NAMES = [f"t5-g{g:03d}-a{a}" for g in range(32) for a in range(8)]


def struck(plan: list[Fault], seed: int = 0, step: int = 5, domain: str = "fix") -> dict[str, int | None]:
    return {n: faults.of_attempt(plan, seed=seed, step=step, attempt=n, domain=domain) for n in NAMES}


@given(st.integers(0, 2**31), st.floats(0.05, 1.0))
def test_whom_a_fault_strikes_follows_from_seed_step_and_attempt(seed: int, fraction: float) -> None:
    plan = [Fault(step=5, kind="sandbox_kill", fraction=fraction)]
    first = struck(plan, seed)
    assert first == struck(plan, seed)
    assert set(struck(plan, seed, step=4).values()) == {None}
    hit = sum(n == 0 for n in first.values())
    assert abs(hit / len(NAMES) - fraction) < 0.2


def test_fraction_1_strikes_all_and_the_first_fault_of_the_plan_counts() -> None:
    plan = [Fault(step=5, kind="verifier_break", fraction=0.5), Fault(step=5, kind="sandbox_kill")]
    counts = Counter(struck(plan).values())
    assert set(counts) == {0, 1} and abs(counts[0] - 128) < 40


def test_a_larger_fraction_strikes_the_same_and_more() -> None:
    few, many = (struck([Fault(step=5, kind="sandbox_kill", fraction=f)]) for f in (0.2, 0.6))
    assert {n for n, hit in few.items() if hit == 0} < {n for n, hit in many.items() if hit == 0}


def test_a_domain_is_left_alone_when_the_fault_names_another() -> None:
    plan = [Fault(step=5, kind="sandbox_kill", domain="look")]
    assert set(struck(plan, domain="look").values()) == {0} and set(struck(plan, domain="fix").values()) == {None}


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        ({"step": 25, "kind": "sandbox_kill"}, r"faults\[0\].step: 25 is never reached"),
        ({"step": 5, "kind": "engine_kill", "domain": "fix"}, r"faults\[0\].domain"),
        ({"step": 5, "kind": "sandbox_kil"}, "sandbox_kil"),
        ({"step": 5, "kind": "sandbox_kill", "fration": 0.5}, r"faults\[0\].fration.*did you mean faults\[0\].fraction"),
        ({"step": 5, "kind": "sandbox_kill", "fraction": 0.0}, "fraction"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused(fault: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse({"faults": [fault]})


def test_sandbox_kill_needs_a_sandbox_that_can_be_killed() -> None:
    with pytest.raises(ConfigError, match=r"faults\[0\].kind: sandbox_kill needs"):
        parse({"sandbox": {"kind": "subprocess"}, "faults": [{"step": 1, "kind": "sandbox_kill"}]})


def test_the_kept_recipe_has_an_outage_and_can_do_without() -> None:
    assert len(load(RECIPE).faults) == 4
    assert load(RECIPE, ("faults=[]",)).faults == ()


@pytest.mark.parametrize(
    ("kind", "boundary", "cause", "end"),
    [
        ("sandbox_kill", Boundary.SANDBOX, Cause.LOST, None),
        ("sandbox_hang", Boundary.SANDBOX, Cause.LOST, None),
        ("verifier_break", Boundary.VERIFIER, Cause.NO_REWARD, AgentEnd.SUBMITTED),
        ("verifier_hang", Boundary.VERIFIER, Cause.TIMEOUT, AgentEnd.SUBMITTED),
    ],
)
async def test_s13_an_injected_fault_is_announced_and_classified_like_any_other(
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    boundary: Boundary,
    cause: Cause,
    end: AgentEnd | None,
) -> None:
    monkeypatch.setattr(base, "PROBE_SECONDS", 0.3)
    attempt = await stage.admit(verify=1.0)
    async with stage.running(faults=[{"step": 3, "kind": kind}], agent={"command_timeout": 0.3}):  # type: ignore[arg-type]
        failed = await stage.failed()
    assert (failed.boundary, failed.cause, failed.agent_end) == (boundary, cause, end)
    assert failed.teardown_error == ""
    (injected,) = await stage.events(FaultInjected)
    assert (injected.kind, injected.attempt, injected.target) == (kind, attempt, failed.session)
    assert [type(e) for e in await stage.events(FaultInjected, InfraFailed)] == [FaultInjected, InfraFailed]
    assert stage.nothing_left()


async def test_attempts_that_no_fault_strikes_are_unharmed(stage: Stage) -> None:  # noqa: F811
    plan = [{"step": 3, "kind": "sandbox_kill", "fraction": 0.5}]
    attempts = [await stage.admit() for _ in range(8)]
    async with stage.running(faults=plan):  # type: ignore[arg-type]
        outcomes = await stage.outcomes(8)
    expected = {a for a in attempts if faults.strikes(0, Fault(step=3, kind="sandbox_kill", fraction=0.5), seed=0, name=a)}
    assert 0 < len(expected) < 8
    assert {a for a, o in outcomes.items() if isinstance(o, InfraFailed)} == expected
    assert all(o.reward == 1.0 for o in outcomes.values() if isinstance(o, VerifierResult))


async def test_s14_an_agent_that_stops_whatever_comes_is_no_fault_of_the_sandbox(
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "PROBE_SECONDS", 1.0)
    await stage.admit()
    stops = "(setsid bash -c 'while :; do kill -STOP -1; done' >/dev/null 2>&1 &)"
    async with stage.running(agent={"script": [SOLVE, stops, "true", "x" * 200_000], "command_timeout": 1.0}):
        outcome = await stage.verified()
    assert (outcome.reward, outcome.agent_end) == (1.0, AgentEnd.SUBMITTED)


async def test_s14_a_command_of_the_agents_that_takes_too_long_is_no_fault_of_the_sandbox(stage: Stage) -> None:  # noqa: F811
    await stage.admit()
    async with stage.running(
        agent={"script": [SOLVE, "for i in $(seq 40); do (while :; do :; done) & done; sleep 60"], "command_timeout": 1.0}
    ):
        outcome = await stage.verified()
    assert (outcome.reward, outcome.agent_end) == (1.0, AgentEnd.SUBMITTED)
