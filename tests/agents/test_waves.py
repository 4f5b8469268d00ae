"""Waves, reservations and pinning (CASES 41): what always holds, whatever comes when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.agents.placement import Need, Node, nodes_of, place
from rl360.agents.waves import Start, pick, pull_share, retry_at
from rl360.config import Waves

TOTAL = Need.of(1000, 4)
needs = st.builds(Need.of, st.integers(1, 1000), st.floats(0.1, 4))
starts = st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), needs), min_size=1, max_size=20)
names = st.sets(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=12)


def waiting_of(drawn: list[tuple[str, Need]]) -> list[Start]:
    return [Start(id=str(number), image=image, need=need) for number, (image, need) in enumerate(drawn)]


@given(starts, st.integers(1, 3), st.data())
def test_no_node_is_ever_over_its_total_no_registry_over_its_budget_and_everybody_starts_in_the_end(
    drawn: list[tuple[str, Need]], max_pulls: int, data: st.DataObject
) -> None:
    """Starts fail, end and come back in any order."""
    node, waiting = Node(total=TOTAL), waiting_of(drawn)
    starting: list[Start] = []
    running: list[Start] = []
    failures = 10
    while waiting or starting:
        going, node = pick(node, waiting, max_pulls=max_pulls, now=0.0)
        waiting = [start for start in waiting if start not in going]
        starting += going
        assert node.fits(Need()), "the sum is within the total"
        assert node.reserved == sum((s.need for s in starting + running), Need())
        assert len(node.pulling) <= max_pulls
        assert starting or running, "somebody always can start where nobody runs"
        over = data.draw(st.sampled_from(starting + running))
        if over in running:
            running.remove(over)
            node = node.end(over.need)
            continue
        starting.remove(over)
        ok = not failures or data.draw(st.booleans())
        node = node.started(over.image, ok=ok)
        failures -= not ok
        if ok:
            running.append(over)
        else:
            node = node.end(over.need)
            waiting.append(over)


def test_a_large_sandbox_is_not_overtaken_for_ever_by_small_ones() -> None:
    node = Node(total=TOTAL).begin("", Need.of(500, 1))
    large, small = Start(id="large", need=Need.of(800, 1)), Start(id="small", need=Need.of(100, 1))
    assert pick(node, [large, small], max_pulls=0, now=0.0)[0] == []
    assert pick(node, [small, large], max_pulls=0, now=0.0)[0] == [small]


def test_who_waits_for_a_pull_lets_others_pass_and_pulls_first() -> None:
    node = Node(warm=frozenset({"warm"}))
    first, same, second, warm = (Start(id=i, image=i[:4], need=Need()) for i in ("cold", "cold-again", "next", "warm"))
    going, node = pick(node, [first, same, second, warm], max_pulls=1, now=0.0)
    assert going == [first, warm]
    going, node = pick(node.started("cold", ok=True), [same, second], max_pulls=1, now=0.0)
    assert going == [same, second]
    assert node.pulling == {"next"}


def test_a_pull_that_failed_is_pulled_again_within_the_budget() -> None:
    going, node = pick(Node(), waiting_of([("a", Need()), ("b", Need())]), max_pulls=1, now=0.0)
    node = node.started(going[0].image, ok=False)
    assert node.pulling == frozenset()
    assert node.is_cold("a")


def test_a_start_waits_until_it_is_due() -> None:
    later = Start(id="0", need=Need(), due=10.0)
    assert pick(Node(), [later], max_pulls=0, now=9.9)[0] == []
    assert pick(Node(), [later], max_pulls=0, now=10.0)[0] == [later]


def test_what_does_not_fit_can_not_be_begun() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Node(total=TOTAL).begin("", Need.of(1001, 1))
    with pytest.raises(ValueError, match="is being pulled already"):
        Node().begin("a", Need()).begin("a", Need())


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_shares_of_all_nodes_are_within_the_registrys_budget(budget: int, nodes: int) -> None:
    if budget >= nodes:  # less is refused by the recipe
        share = pull_share(Waves(max_pulls=budget), nodes)
        assert share >= 1
        assert share * nodes <= budget


@given(st.integers(1, 9), st.floats(0, 1, exclude_max=True))
def test_a_retry_waits_longer_each_time_up_to_a_bound_and_is_spread(tries: int, random: float) -> None:
    waves = Waves(tries=9, retry_seconds=2.0)
    at = retry_at(waves, tries=tries, now=100.0, random=random)
    if tries == 9:
        assert at is None
    else:
        longest = 2.0 * min(2 ** (tries - 1), 32)
        assert at is not None
        assert 100 + longest / 2 <= at <= 100 + longest


@given(names, st.text(max_size=5), st.integers(1, 4), st.data())
def test_a_node_that_goes_moves_only_its_own_images_and_each_to_one_other_node(
    nodes: set[str], image: str, spread: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(nodes)))
    before, after = nodes_of(image, nodes, spread), nodes_of(image, nodes - {gone}, spread)
    assert len(set(before)) == min(spread, len(nodes))
    if gone in before:
        assert set(before) - {gone} <= set(after)
        assert len(set(after) - set(before)) <= 1
    else:
        assert after == before  # read from right to left: a node that comes takes only what is now its own


def test_images_are_spread_evenly_enough() -> None:
    nodes = [f"n{i}" for i in range(8)]
    counts = dict.fromkeys(nodes, 0)
    for image in range(800):
        counts[nodes_of(str(image), nodes, 1)[0]] += 1
    assert min(counts.values()) > 60
    assert max(counts.values()) < 145


def test_of_the_nodes_of_an_image_the_least_loaded_takes_the_start() -> None:
    assert place(("b", "a"), {"a": 1, "b": 1, "c": 0}) == "b"
    assert place(("b", "a"), {"a": 0, "b": 1, "c": 0}) == "a"


def test_a_start_that_failed_proves_nothing_about_an_image_that_is_there() -> None:
    node = Node(warm=frozenset({"a"}))
    assert node.begin("a", Need()).started("a", ok=False).warm == {"a"}
