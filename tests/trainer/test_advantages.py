"""S19: the baseline of a group, and nothing that isn't finite."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.trainer.advantages import AdvantageError, advantages

disagreeing = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16).filter(lambda r: max(r) - min(r) > 1e-3)


@given(disagreeing, st.booleans())
def test_s19_advantages_are_finite_and_centred(rewards, std):
    result = advantages(rewards, std=std)
    assert all(map(math.isfinite, result.values))
    assert math.fsum(result.values) == pytest.approx(0, abs=1e-6)
    assert min(rewards) <= result.baseline <= max(rewards)


@given(disagreeing, st.floats(0.1, 10))
def test_std_normalized_advantages_do_not_depend_on_the_scale_of_rewards(rewards, factor):
    scaled = advantages([factor * r for r in rewards], std=True)
    assert scaled.values == pytest.approx(advantages(rewards, std=True).values, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "std", "message"),
    [([1.0], False, "at least two"), ([1.0, math.nan], False, "not all are finite"), ([1.0, 1.0], True, "rewards that agree")],
)
def test_case_7_what_would_poison_the_gradient_is_refused(rewards, std, message):
    with pytest.raises(AdvantageError, match=message):
        advantages(rewards, std=std)
