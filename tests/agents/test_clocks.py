"""S15: one clock a phase; a timeout belongs to the phase whose clock ran out."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from rl360.agents import clocks
from rl360.agents.clocks import PhaseClock, budget
from rl360.bus.events import Budgets, Phase

SECONDS = st.floats(0.1, 1000)
BUDGETS = st.builds(Budgets, queue=SECONDS, setup=SECONDS, agent=SECONDS, verify=SECONDS, collect=SECONDS, margin=SECONDS)


def test_the_examples_run() -> None:
    assert doctest.testmod(clocks).failed == 0


@given(BUDGETS, st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_s15_each_phase_gets_its_whole_budget_whatever_the_others_took(budgets: Budgets, shares: list[float]) -> None:
    now = 1000.0
    clock = PhaseClock.taken(budgets, admitted=now, up=0.0, now=now, life=1)
    for phase, share in zip(Phase, shares, strict=True):
        clock = clock.enter(phase, now)
        assert clock.left(now) >= budget(budgets, phase) * (1 - 1e-9)
        now += share * budget(budgets, phase) * 0.999
        assert clock.ran_out(now) is None
        assert clock.ran_out(clock.deadline) is phase


@given(BUDGETS)
def test_s15_the_outer_deadline_ends_every_life(budgets: Budgets) -> None:
    late = PhaseClock.taken(budgets, admitted=0.0, up=0.0, now=budgets.outer, life=2)
    assert late.enter(Phase.AGENT, budgets.outer).ran_out(budgets.outer) is Phase.AGENT


def test_s15_a_later_life_has_not_waited_in_the_queue_and_a_resumed_run_has_not_either() -> None:
    budgets = Budgets(queue=10, setup=5, agent=60, verify=20, collect=5, margin=3)
    taken = PhaseClock.taken(budgets, admitted=0.0, up=0.0, now=50.0, life=1)
    assert taken.ran_out(50.0) is Phase.QUEUE
    assert PhaseClock.taken(budgets, admitted=0.0, up=0.0, now=50.0, life=2).ran_out(50.0) is None
    assert PhaseClock.taken(budgets, admitted=0.0, up=45.0, now=50.0, life=1).ran_out(50.0) is None
