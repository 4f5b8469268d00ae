"""S6 to S9: what was sampled is what is trained, once each, with its log-prob and version."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.bus.codec import Recorded
from rl360.bus.events import (
    AgentEnd,
    Boundary,
    Cause,
    Event,
    InfraFailed,
    Receipt,
    RoutingDelta,
    SessionClosed,
    TrajectoryMerged,
    VerifierResult,
)
from rl360.bus.sample import decode, decode_routing
from rl360.sessions.merge import Arrays, Merged, MergeError, merge_session, trim
from rl360.sessions.merger import Merger
from rl360.sessions.messages import Message
from tests.sessions.driver import FIRST_SAMPLED, PureSession, logprob, pack, unpack

SYSTEM = Message(role="system", content="s")
ATTEMPT, SESSION = "t1-g000-a0", "t1-g000-a0.1"


def user(text: str) -> Message:
    return Message(role="user", content=text)


def merge(session: PureSession) -> list[Merged]:
    return merge_session(session.events, [], unpack, replay=False)


def trained(samples: list[Merged]) -> list[int]:
    return [t for m in samples for t in m.sample.ids[m.sample.mask == 1].tolist()]


def check_exact(session: PureSession, samples: list[Merged]) -> None:
    """Masks, log-probs and versions of the sampled tokens, and nothing elsewhere."""
    version = {t: s.version for e in session.events for s in e.spans for t in session.sampled[e.turn][s.start : s.end]}
    for m in samples:
        s = m.sample
        assert len(s.ids) == len(s.mask) == len(s.logprobs) == len(s.versions)
        for token, mask, lp, v in zip(s.ids.tolist(), s.mask.tolist(), s.logprobs.tolist(), s.versions.tolist(), strict=True):
            assert (lp, v) == ((logprob(token), version[token]) if mask else (0.0, -1))
            assert not mask or token >= FIRST_SAMPLED
    assert all(s.sample.ids.tolist() == session.sent[_leaf(session, s)] for s in samples)


def _leaf(session: PureSession, merged: Merged) -> int:
    last = merged.sample.ids[-1]
    return next(n for n, ids in session.sampled.items() if ids[-1] == last)


def test_s6_one_sample_with_mask_logprobs_and_versions() -> None:
    s = PureSession()
    one = s.ask([SYSTEM, user("a")])
    s.ask([SYSTEM, user("a"), s.reply(one), user("b")], split=1)
    (m,) = merge(s)
    check_exact(s, [m])
    assert trained([m]) == s.sampled[1] + s.sampled[2]
    assert (m.turns, m.sampled, m.min_version, m.max_version) == (2, 6, 1, 3)
    assert m.best_cached == len(s.sent[1]) - 1


def test_s6_branches_share_their_prefix_with_mask_0() -> None:
    s = PureSession()
    base = [user("a")]
    base += [s.reply(s.ask(base)), user("b")]
    s.ask(base)
    s.ask([*base[:2], user("c")])
    first, second = merge(s)
    check_exact(s, [first, second])
    assert trained([first]) == s.sampled[1] + s.sampled[2]
    assert trained([second]) == s.sampled[3]
    assert (first.sample.branch, second.sample.branch) == (0, 1)
    assert (first.turns, second.turns) == (2, 1)


def test_s4_a_turn_that_was_rolled_back_is_in_no_sample() -> None:
    s = PureSession()
    base = [user("a")]
    base += [s.reply(s.ask(base)), user("b")]
    s.ask(base, format_error=True)
    s.ask([*base, user("error")])
    (m,) = merge(s)
    check_exact(s, [m])
    assert trained([m]) == s.sampled[1] + s.sampled[3]
    assert (m.turns, m.dropped_turns, m.format_errors) == (2, 1, 1)


def test_s4_a_turn_that_was_rolled_back_and_taken_up_again_is_trained_once() -> None:
    s = PureSession()
    one = s.ask([user("a")])
    s.ask([user("a"), user("error")])
    s.ask([user("a"), s.reply(one), user("after all")])
    samples = merge(s)
    check_exact(s, samples)
    assert sorted(trained(samples)) == sorted(t for ids in s.sampled.values() for t in ids)


def test_s7_the_cut_turn_stays_and_every_later_one_is_dropped() -> None:
    s = PureSession()
    base = [user("a")]
    base += [s.reply(s.ask(base)), user("b")]
    cut = s.ask(base, cut=True)
    s.ask([*base, s.reply(cut), user("c")])
    s.ask([user("other")])
    (m,) = merge(s)
    assert trained([m]) == s.sampled[1] + s.sampled[2]
    assert (m.turns, m.dropped_turns) == (2, 2)


def test_s8_one_trim_cuts_every_array_and_refuses_short_ones() -> None:
    s = PureSession()
    s.ask([user("a")])
    rows = np.zeros((len(s.sent[1]) - 1, 2, 2), np.uint8)
    (m,) = merge_session(s.events, [delta(1, 0, rows)], unpack, replay=True)
    assert m.routing is not None
    assert m.routing.rows == len(m.sample) - 1
    n = np.zeros(5, np.int32)
    whole = Arrays(ids=n, mask=n.astype(np.uint8), logprobs=n.astype(np.float32), versions=n, rows=np.zeros((4, 1, 1), np.uint8))
    assert [len(trim(whole, k)) for k in (0, 1, 5)] == [0, 1, 5]
    for bad in ({"versions": n[:4]}, {"rows": np.zeros((3, 1, 1), np.uint8)}):
        with pytest.raises(MergeError, match="can't be cut"):
            trim(msgspec.structs.replace(whole, **bad), 5)


def test_turns_that_do_not_fit_together_are_refused() -> None:
    s = PureSession()
    one = s.ask([user("a")])
    s.ask([user("a"), s.reply(one), user("b")])
    first, second = s.events
    for turns, why in (
        ([second], "is missing"),
        ([first, msgspec.structs.replace(second, base=3)], "continues 3 tokens"),
        ([msgspec.structs.replace(first, spans=())], "don't cover"),
        ([msgspec.structs.replace(first, logprobs=pack(b"\0\0\0\0"))], "1 log-probs"),
    ):
        with pytest.raises(MergeError, match=why):
            merge_session(turns, [], unpack, replay=False)


# ---------------------------------------------------------------------------------------------------- always


@given(st.integers(0, 2**32), st.integers(1, 14))
@settings(max_examples=150, deadline=None)
def test_s6_always_every_sampled_token_is_trained_once_or_was_rolled_back(seed: int, requests: int) -> None:
    """Random agents: they go on, retry, drop or rewrite replies, go back, start over, and get cut off."""
    rng = random.Random(seed)
    s = PureSession()
    histories: list[list[Message]] = [[SYSTEM, user("start")]]
    for i in range(requests):
        asked = agent(rng, histories, i)
        before = len(s.events)
        turn = s.ask(asked, tokens=rng.randint(1, 4), split=rng.randint(0, 3))
        again = s.ask(asked)
        assert again == turn  # S5, whatever happened before
        assert len(s.events) - before <= 1
        histories.append([*asked, s.reply(turn)])
    samples = merge(s)
    check_exact(s, samples)
    alive = {n for m in samples for n in s.tree.path(_leaf(s, m))}
    assert sorted(trained(samples)) == sorted(t for n in alive for t in s.sampled[n])
    assert {n for n in s.sampled if n not in alive} <= s.tree.dropped
    assert sum(m.turns for m in samples) + samples[0].dropped_turns == len(s.events)


def agent(rng: random.Random, histories: list[list[Message]], i: int) -> list[Message]:
    """The next request of an agent that may do anything with its history."""
    last = histories[-1] if rng.random() < 0.7 else rng.choice(histories)
    new = user(f"{rng.choice('xyz')}{i if rng.random() < 0.8 else ''}")
    if last[-1].role != "assistant":
        return last
    move = rng.random()
    if move < 0.5:
        return [*last, new]
    if move < 0.65:
        return [*last[:-1], new]
    if move < 0.75:
        return [*last[:-1], Message(role="assistant", content="rewritten"), new]
    if move < 0.85:
        return last[:-1]
    cut = rng.randint(1, len(last))
    return [*last[:cut], new]


# ---------------------------------------------------------------------------------------------------- routing


def delta(turn: int, first: int, rows: np.ndarray[Any, Any]) -> RoutingDelta:
    n, layers, topk = rows.shape
    data = pack(rows.tobytes())
    return RoutingDelta(
        run="test", step=1, attempt=ATTEMPT, group=0, session=SESSION, turn=turn, first=first, rows=n, layers=layers, topk=topk,
        dtype=str(rows.dtype), data=data,
    )  # fmt: skip


def rows_of(first: int, last: int, dtype: str = "u1") -> np.ndarray[Any, Any]:
    return np.array([[[(r + k) % 251 for k in range(2)] for _ in range(3)] for r in range(first, last)], dtype).reshape(-1, 3, 2)


def two_turns() -> tuple[PureSession, int, int]:
    s = PureSession()
    one = s.ask([user("a")])
    s.ask([user("a"), s.reply(one), user("b")])
    return s, len(s.sent[1]), len(s.sent[2])


@pytest.mark.parametrize("dtype", ["u1", "<u2"])
def test_s9_deltas_of_the_turns_stitch_to_one_row_a_token_but_the_last(dtype: str) -> None:
    s, n, total = two_turns()
    deltas = [delta(1, 0, rows_of(0, n - 1, dtype)), delta(2, n - 1, rows_of(n - 1, total - 1, dtype))]
    (m,) = merge_session(s.events, deltas, unpack, replay=True)
    assert m.routing is not None
    assert (m.routing.array == rows_of(0, total - 1, dtype)).all()
    assert (len(m.sample), m.cut_tokens) == (total, 0)


def test_case25_a_turn_without_rows_cuts_the_sample_at_the_last_covered_token() -> None:
    s, n, total = two_turns()
    (m,) = merge_session(s.events, [delta(1, 0, rows_of(0, n - 1))], unpack, replay=True)
    assert (len(m.sample), m.cut_tokens) == (n, total - n)
    assert m.routing is not None
    assert m.routing.rows == n - 1
    assert trained([m]) == s.sampled[1]
    (m,) = merge_session(s.events, [], unpack, replay=True)
    assert (m.sampled, len(m.sample)) == (0, 1)


def test_case25_rows_that_a_later_turn_brings_fill_the_hole() -> None:
    s, _, total = two_turns()
    (m,) = merge_session(s.events, [delta(2, 0, rows_of(0, total - 1))], unpack, replay=True)
    assert (len(m.sample), m.cut_tokens) == (total, 0)


# ---------------------------------------------------------------------------------------------------- the merger


def closed(turns: int, session: str = SESSION) -> SessionClosed:
    return SessionClosed(run="test", step=1, attempt=ATTEMPT, group=0, session=session, reason="done", turns=turns)


def verdict(session: str = SESSION) -> VerifierResult:
    receipt = Receipt(file="f", file_digest="d", verifier_digest="v", exit_status=0, agent_dead_at=0.0, written_at=1.0)
    return VerifierResult(
        run="test", step=1, attempt=ATTEMPT, group=0, session=session, reward=1.0, low=0.0, high=1.0, receipt=receipt, exit_status=0,
        agent_end=AgentEnd.SUBMITTED,
    )  # fmt: skip


def infra(session: str = SESSION) -> InfraFailed:
    return InfraFailed(
        run="test", step=1, attempt=ATTEMPT, group=0, session=session, boundary=Boundary.SANDBOX, cause=Cause.LOST, exception="X"
    )


def fold(*events: Event, done: frozenset[str] = frozenset()) -> list[TrajectoryMerged]:
    merger = Merger(pack=lambda d: pack(bytes(d)), unpack=unpack, replay=False, done=done)
    out: list[Any] = []
    for i, event in enumerate(events, 1):
        out += merger.on(Recorded(seq=i, time=0.0, event=event))  # type: ignore[arg-type]
    return out


def test_an_attempt_is_merged_once_when_its_verdict_and_its_whole_session_are_there() -> None:
    s, _, total = two_turns()
    whole = [*s.events, closed(2), verdict()]
    (event,) = fold(*whole)
    assert (event.tokens, event.sampled, event.branches, event.branch) == (total, 6, 1, 0)
    assert decode(unpack(event.sample)).ids.tolist() == s.sent[2]
    for order in ([verdict(), *whole[:-1]], [s.events[1], closed(2), s.events[0], verdict()], [*whole, *whole]):
        assert fold(*order) == [event]
    assert fold(*whole[:-1]) == fold(*s.events, verdict()) == fold(s.events[0], closed(2), verdict()) == []


def test_case19_folding_again_gives_the_same_samples_and_what_is_done_is_left_alone() -> None:
    s, _, _ = two_turns()
    whole = [*s.events, closed(2), verdict()]
    assert fold(*whole) == fold(*whole)
    assert fold(*whole, done=frozenset({SESSION})) == []


def test_s16_only_the_session_of_the_first_outcome_is_merged() -> None:
    s, _, _ = two_turns()
    assert fold(*s.events, closed(2), infra(), verdict()) == []
    assert len(fold(*s.events, closed(2), verdict(), infra())) == 1
    assert len(fold(*s.events, verdict(), infra(), closed(2))) == 1
    second = "t1-g000-a0.2"
    moved = [msgspec.structs.replace(e, session=second) for e in s.events]
    got = fold(*s.events, *moved, closed(2), closed(2, second), verdict(second), verdict())
    assert [e.session for e in got] == [second]


def test_case7_an_attempt_without_a_turn_says_so_and_has_no_token() -> None:
    (event,) = fold(closed(0), verdict())
    assert (event.tokens, event.sampled, event.turns, event.branches) == (0, 0, 0, 1)
    assert len(decode(unpack(event.sample))) == 0


def test_s10_routing_travels_as_raw_bytes() -> None:
    s, n, total = two_turns()
    merger = Merger(pack=lambda d: pack(bytes(d)), unpack=unpack, replay=True)
    events = [*s.events, delta(1, 0, rows_of(0, n - 1)), delta(2, n - 1, rows_of(n - 1, total - 1)), closed(2), verdict()]
    out = [e for i, event in enumerate(events) for e in merger.on(Recorded(seq=i, time=0.0, event=event))]
    routing = out[0].routing  # type: ignore[union-attr]
    assert routing.size < (total - 1) * 6 + 100
    assert decode_routing(unpack(routing)).rows == total - 1
