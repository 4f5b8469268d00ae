"""Slots: the longest prefix is found, nothing is overwritten that is in use, and rows remember who wrote them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rl360.engines.tiny.cache import Slot, Slots, common_prefix

ids = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def hold(slots: Slots, tokens: list[int], *, busy: bool = False) -> Slot:
    """Place a request, compute all its rows, and give it up unless `busy`."""
    placement = slots.place(tokens)
    assert placement is not None
    slots.take(placement, tokens)
    placement.slot.stamp(1, "1")
    placement.slot.rows = len(tokens)
    if not busy:
        slots.release(placement.slot)
    return placement.slot


@given(ids, ids)
def test_common_prefix_always_equals_a_plain_count(a: list[int], b: list[int]) -> None:
    limit = min(len(a), len(b))
    plain = next((i for i in range(limit) if a[i] != b[i]), limit)
    assert common_prefix(a, b, limit) == plain


@given(st.lists(st.tuples(ids, st.booleans()), max_size=20), ids)
def test_a_placement_always_has_the_longest_prefix_and_an_idle_slot(history: list[tuple[list[int], bool]], new: list[int]) -> None:
    slots = Slots(4)
    for tokens, busy in history:
        if slots.place(tokens) is None:
            break
        hold(slots, tokens, busy=busy)
    placement = slots.place(new)
    if all(s.busy for s in slots.all):
        assert placement is None
        return
    assert placement is not None
    assert not placement.slot.busy
    longest = max(common_prefix(s.ids, new, min(s.rows, len(new) - 1)) if s.rows and len(new) > 1 else 0 for s in slots.all)
    assert placement.cached == longest
    origin = placement.source or placement.slot
    assert origin.ids[: placement.cached] == new[: placement.cached]


def test_a_session_finds_its_own_slot_again() -> None:
    slots = Slots(4)
    a, b = hold(slots, [1, 2, 3]), hold(slots, [1, 9, 9])
    assert a is not b
    placement = slots.place([1, 9, 9, 4, 5])
    assert placement is not None
    assert (placement.slot, placement.cached, placement.source) == (b, 3, None)


def test_a_prefix_that_another_session_needs_is_copied_not_cut() -> None:
    slots = Slots(4)
    a = hold(slots, [1, 2, 3, 4, 5, 6])
    placement = slots.place([1, 2, 3, 7])
    assert placement is not None
    assert (placement.slot is not a, placement.cached, placement.source) == (True, 3, a)
    slots.take(placement, [1, 2, 3, 7])
    assert placement.slot.rows == 3
    assert a.rows == 6


def test_the_least_recently_used_slot_is_evicted() -> None:
    slots = Slots(3)
    first, second, third = hold(slots, [1, 1]), hold(slots, [2, 2]), hold(slots, [3, 3])
    assert hold(slots, [1, 1, 4]) is first  # used again: the second is the oldest now
    assert hold(slots, [5, 5]) is second
    assert hold(slots, [6, 6]) is third


def test_rows_remember_the_weights_that_wrote_them() -> None:
    slot = Slot(0)
    slot.stamp(0, "0")
    slot.rows = 5
    slot.stamp(1, "1")
    slot.stamp(2, "2")  # nothing was written under epoch 1
    slot.rows = 8
    assert [tuple(s) for s in slot.stamps] == [(0, "0", 0), (2, "2", 5)]
    slot.cut(5)
    assert [tuple(s) for s in slot.stamps] == [(0, "0", 0)]


def test_flush_forgets_idle_slots_alone() -> None:
    slots = Slots(2)
    idle, busy = hold(slots, [1, 2]), hold(slots, [3, 4], busy=True)
    slots.flush()
    assert (idle.rows, busy.rows) == (0, 2)
