"""S14, S16, S18, S19, S24: one valid set; kept or dropped with a reason; the fate of every attempt."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.config import parse
from rl360.trainer.group_filter import GroupFilter
from rl360.trainer.groups import GroupContext, Rules, decide_group, survivors
from rl360.trainer.outcomes import AttemptOutcome, Outcomes
from tests.trainer.world import RUN, failed, trajectory, verified

FAILED = None
PLAIN = Rules()
CONTEXT = GroupContext(run=RUN, step=0, trained_on=0)


def name(index: int) -> str:
    return ev.attempt_id(ev.Purpose.TRAIN, 0, 0, index)


def outcome(index: int, reward: float | None, **more: object) -> AttemptOutcome:
    """An attempt with this reward, or one that failed. `end`, `errors`, `version`, `sampled`, `branches` as in the world."""
    if reward is FAILED:
        return AttemptOutcome(name(index), failed(name(index)))
    terminal = verified(name(index), reward, end=more.pop("end", ev.AgentEnd.SUBMITTED))
    branches = more.get("branches", 1)
    return AttemptOutcome(name(index), terminal, tuple(trajectory(name(index), branch=b, **more) for b in range(branches)))


def decide(outcomes: list[AttemptOutcome], rules: Rules = PLAIN, context: GroupContext = CONTEXT) -> ev.GroupDecided:
    spec = ev.GroupSpec(group=0, task="t", digest="d", domain="fix", attempts=len(outcomes))
    return decide_group(spec, outcomes, rules, context)


def of(rewards: list[float | None], **rules: object) -> ev.GroupDecided:
    return decide([outcome(i, r) for i, r in enumerate(rewards)], Rules(**rules))


rewards = st.lists(st.one_of(st.none(), st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=9)


@given(rewards)
def test_s18_a_group_trains_iff_two_valid_attempts_disagree(rs):
    valid = [r for r in rs if r is not None]
    decided = of(rs)
    assert decided.kept == (len(valid) >= 2 and len(set(valid)) > 1)
    assert bool(decided.reason) is not decided.kept
    assert decided.n_valid == len(valid)


@given(rewards)
def test_s18_every_attempt_has_one_fate_and_failures_have_no_reward(rs):
    decided = of(rs)
    assert [a.attempt for a in decided.attempts] == [name(i) for i in range(len(rs))]
    for reward, a in zip(rs, decided.attempts, strict=True):
        if reward is None:
            assert (a.fate, a.reason, a.reward, a.raw_reward, a.advantage) == (ev.Fate.MASKED, "sandbox/lost", None, None, None)
        else:
            assert a.fate is (ev.Fate.TRAINED if decided.kept else ev.Fate.DROPPED)
            assert a.reward == reward
            assert (a.advantage is not None) == decided.kept


@given(rewards)
def test_s19_the_baseline_is_the_mean_over_the_valid_attempts_and_advantages_sum_to_zero(rs):
    decided = of(rs)
    valid = [r for r in rs if r is not None]
    if not decided.kept:
        assert decided.baseline is None
        return
    assert decided.baseline == pytest.approx(sum(valid) / len(valid))
    given_out = [a.advantage for a in decided.attempts if a.advantage is not None]
    assert given_out == pytest.approx([r - decided.baseline for r in valid])
    assert math.fsum(given_out) == pytest.approx(0, abs=1e-12)


@given(rewards, st.lists(st.none(), max_size=5))
def test_s18_failures_change_nothing_for_the_others(rs, failures):
    """Whatever the number of failed attempts beside them, valid attempts get the same baseline and advantages."""
    alone, beside = of([r for r in rs if r is not None]) if any(r is not None for r in rs) else of([None]), of([*rs, *failures])
    assert beside.baseline == alone.baseline
    assert [a.advantage for a in beside.attempts if a.reward is not None] == [a.advantage for a in alone.attempts if a.reward is not None]


@given(st.permutations(range(6)))
def test_s19_the_order_of_attempts_does_not_matter(order):
    values = [0.1, 0.7, 0.2, 1.0, 0.3, 0.6]
    base = of([values[i] for i in order])
    assert base.baseline == of(values).baseline


@pytest.mark.parametrize(
    ("rs", "reason"),
    [
        ([1.0, 1.0, None], "all_pass"),
        ([0.0, 0.0], "all_fail"),
        ([0.5, 0.5], "no_disagreement"),
        ([1.0, None, None], "insufficient_valid"),
        ([None, None], "insufficient_valid"),
        ([1.0, 0.0, None], ""),
    ],
)
def test_s18_reasons(rs, reason):
    assert of(rs).reason == reason


def test_case_3_groups_of_different_size_have_their_own_baselines():
    assert of([5 / 5] * 4).reason == "all_pass"  # no -1.09 for a group that agrees
    assert of([1.0, 0.0, 0.0]).baseline == pytest.approx(1 / 3)


def test_case_4_branches_of_an_attempt_have_one_vote():
    outcomes = [outcome(0, 1.0, branches=3), outcome(1, 0.0)]
    decided = decide(outcomes)
    assert decided.baseline == 0.5
    assert [a.advantage for a in decided.attempts] == [0.5, -0.5]


def test_case_7_an_empty_sample_is_not_valid():
    decided = decide([outcome(0, 1.0), outcome(1, 0.0), outcome(2, 0.0, sampled=0)])
    assert decided.baseline == 0.5
    assert (decided.attempts[2].fate, decided.attempts[2].reason, decided.attempts[2].reward) == (ev.Fate.MASKED, "empty", None)
    assert decided.attempts[2].raw_reward == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5, 1.5])
def test_s12_a_number_that_is_no_reward_never_counts(bad):
    decided = of([1.0, 0.0, bad])
    assert decided.baseline == 0.5
    assert (decided.attempts[2].fate, decided.attempts[2].reason) == (ev.Fate.MASKED, "verifier/bad_reward")


def test_case_8_the_verdict_stands_although_the_agent_ran_out_of_time():
    decided = decide([outcome(0, 1.0, end=ev.AgentEnd.TIMEOUT), outcome(1, 0.0)])
    assert decided.attempts[0].reward == 1.0
    assert decided.kept


@pytest.mark.parametrize(
    ("end", "rule", "other"),
    [
        (ev.AgentEnd.TIMEOUT, "agent_timeout", "truncation"),
        (ev.AgentEnd.LENGTH, "truncation", "agent_timeout"),
        (ev.AgentEnd.CONTEXT, "truncation", "agent_timeout"),
    ],
)
def test_s14_mask_and_zero_are_the_recipes_choice_and_both_facts_are_kept(end, rule, other):
    outcomes = [outcome(0, 1.0, end=end), outcome(1, 1.0), outcome(2, 0.0)]
    masked = decide(outcomes, Rules(**{rule: "mask"}))
    assert (masked.attempts[0].fate, masked.attempts[0].reason, masked.attempts[0].raw_reward) == (ev.Fate.MASKED, rule, 1.0)
    assert masked.baseline == 0.5
    zeroed = decide(outcomes, Rules(**{rule: "zero"}))
    assert (zeroed.attempts[0].reward, zeroed.attempts[0].raw_reward, zeroed.attempts[0].reason) == (0.0, 1.0, rule)
    assert zeroed.baseline == pytest.approx(1 / 3)
    assert decide(outcomes, Rules(**{other: "zero"})).attempts[0].reward == 1.0


def test_s14_running_out_of_turns_is_judged_by_the_verifier_alone():
    decided = decide([outcome(0, 1.0, end=ev.AgentEnd.TURNS), outcome(1, 0.0)], Rules(agent_timeout="mask", truncation="zero"))
    assert [a.reward for a in decided.attempts] == [1.0, 0.0]


def test_a_group_zeroed_by_the_recipe_is_all_fail_whatever_the_verifier_wrote():
    outcomes = [outcome(i, 1.0, end=ev.AgentEnd.TIMEOUT) for i in range(2)]
    assert decide(outcomes, Rules(agent_timeout="zero")).reason == "all_fail"


def test_shaping_takes_the_penalty_off_a_pass_with_a_format_error_and_keeps_the_raw_reward():
    outcomes = [outcome(0, 1.0, errors=2), outcome(1, 1.0), outcome(2, 0.5, errors=1), outcome(3, 0.0, errors=1)]
    decided = decide(outcomes, Rules(format_error_penalty=0.3))
    assert [a.reward for a in decided.attempts] == [0.7, 1.0, 0.5, 0.0]
    assert [a.raw_reward for a in decided.attempts] == [1.0, 1.0, 0.5, 0.0]
    assert decide(outcomes[:2], Rules(format_error_penalty=0.3)).kept, "two passes disagree when one was sloppy"
    assert decide([outcomes[0], outcome(1, 1.0, errors=1)], Rules(format_error_penalty=0.3)).reason == "all_pass"


def test_s24_cases_42_what_is_older_than_the_bound_is_stale_and_leaves_the_valid_set():
    outcomes = [outcome(0, 1.0, version=3), outcome(1, 0.0, version=4), outcome(2, 1.0, version=2)]
    decided = decide(outcomes, Rules(max_staleness=1), GroupContext(run=RUN, step=0, trained_on=4))
    assert [a.fate for a in decided.attempts] == [ev.Fate.TRAINED, ev.Fate.TRAINED, ev.Fate.STALE]
    assert decided.attempts[2].reason == "2 versions behind"
    assert (decided.baseline, decided.n_valid, decided.attempts[2].advantage) == (0.5, 2, None)


def test_s24_a_group_that_staleness_leaves_too_small_says_stale():
    outcomes = [outcome(0, 1.0, version=0), outcome(1, 0.0, version=4)]
    context = GroupContext(run=RUN, step=0, trained_on=4)
    assert decide(outcomes, Rules(max_staleness=1), context).reason == "stale"
    assert decide([outcome(0, 1.0, version=0), outcome(1, FAILED)], Rules(max_staleness=1), context).reason == "insufficient_valid"
    assert decide(outcomes, Rules(max_staleness=4), context).kept


def test_an_evaluation_is_recorded_and_never_kept():
    context = GroupContext(run=RUN, step=0, trained_on=9, purpose=ev.Purpose.EVAL)
    decided = decide([outcome(0, 1.0), outcome(1, 0.0), outcome(2, FAILED)], Rules(max_staleness=0), context)
    assert (decided.kept, decided.reason, decided.n_valid, decided.purpose) == (False, "eval", 2, ev.Purpose.EVAL)
    assert [(a.fate, a.reward) for a in decided.attempts] == [(ev.Fate.DROPPED, 1.0), (ev.Fate.DROPPED, 0.0), (ev.Fate.MASKED, None)]


def test_std_normalization_divides_by_the_groups_own_deviation():
    decided = of([1.0, 0.0, 1.0, 0.0, None], advantage_std=True)
    assert [a.advantage for a in decided.attempts[:2]] == pytest.approx([0.8660254, -0.8660254])


def test_a_group_with_a_missing_outcome_is_not_decided():
    spec = ev.GroupSpec(group=0, task="t", digest="d", domain="fix", attempts=2)
    with pytest.raises(ValueError, match="1 outcomes, 2 attempts"):
        decide_group(spec, [outcome(0, 1.0)], Rules(), CONTEXT)


def test_rules_come_from_the_recipe():
    recipe = parse({"agent": {"agent_timeout": "mask", "truncation": "zero"}, "reward": {"format_error_penalty": 0.3}})
    assert Rules.of(recipe) == Rules(agent_timeout="mask", truncation="zero", format_error_penalty=0.3)


# ---------------------------------------------------------------------------------------------------- the machine


class Feed:
    """A filter with a journal's sequence."""

    def __init__(self, *groups: int, rules: Rules = PLAIN, step: int = 0) -> None:
        self.filter, self.seq = GroupFilter(rules), 0
        specs = tuple(ev.GroupSpec(group=g, task="t", digest="d", domain="fix", attempts=2) for g in groups or (0,))
        assert self.on(ev.StepOpened(run=RUN, step=step, version=0, groups=specs)) == []

    def on(self, *events: ev.Event) -> list[ev.Event]:
        said: list[ev.Event] = []
        for event in events:
            self.seq += 1
            said += self.filter.on(Recorded(self.seq, float(self.seq), event))
        return said


A, B = "t0-g000-a0", "t0-g000-a1"


def test_s16_a_group_is_decided_once_all_attempts_are_over_and_all_branches_are_merged():
    feed = Feed()
    assert feed.on(verified(A, 1.0), trajectory(A, branches=2), failed(B)) == []
    [decided] = feed.on(trajectory(A, branch=1, branches=2))
    assert [a.fate for a in decided.attempts] == [ev.Fate.DROPPED, ev.Fate.MASKED]
    assert feed.on(trajectory(A, branches=2)) == []


def test_s16_case_11_the_first_outcome_wins_and_a_late_one_is_counted_apart():
    feed = Feed()
    first = feed.on(failed(A, cause=ev.Cause.TIMEOUT), verified(A, 1.0, life=2))
    assert [(e.attempt, e.kind, e.first_seq) for e in first] == [(A, "VerifierResult", 2)]
    [decided] = feed.on(failed(B))
    assert decided.attempts[0].reason == "sandbox/timeout"
    assert len(decided.attempts) == 2
    late = feed.on(failed(A, life=3))
    assert [type(e) for e in late] == [ev.LateOutcome]


def test_a_sample_of_another_life_does_not_count():
    feed = Feed()
    assert feed.on(verified(A, 1.0, life=2), trajectory(A), failed(B)) == []


def test_groups_of_one_step_are_decided_one_by_one():
    feed = Feed(0, 1)
    assert len(feed.on(failed(A), failed(B))) == 1
    assert len(feed.on(failed("t0-g001-a0", group=1), failed("t0-g001-a1", group=1))) == 1


def trained(step: int, version: int) -> ev.StepTrained:
    return ev.StepTrained(
        run=RUN,
        step=step,
        version=version,
        samples=1,
        tokens=1,
        divisor=1.0,
        loss=0.0,
        grad_norm=1.0,
        metrics={},
        seconds={},
        checkpoint="",
    )


def test_s24_staleness_is_judged_against_the_version_that_the_step_trains_on():
    feed = Feed(step=1, rules=Rules(max_staleness=0))
    a, b = "t1-g000-a0", "t1-g000-a1"
    outcomes = [e for x, r in ((a, 1.0), (b, 0.0)) for e in (verified(x, r, step=1), trajectory(x, step=1, version=0))]
    assert feed.on(*outcomes) == [], "step 0 is not trained yet"
    [decided] = feed.on(trained(0, 1))
    assert [x.fate for x in decided.attempts] == [ev.Fate.STALE, ev.Fate.STALE]


def test_s21_survivors_are_all_samples_of_kept_attempts_with_their_advantage():
    outcomes = Outcomes()
    for seq, event in enumerate(
        [verified(A, 1.0), trajectory(A, branches=2), trajectory(A, branch=1, branches=2), verified(B, 0.0), trajectory(B)]
    ):
        outcomes.on(Recorded(seq, 0.0, event))
    decided = decide([outcome(0, 1.0, branches=2), outcome(1, 0.0)])
    assert [(s.merged.attempt, s.merged.branch, s.advantage) for s in survivors([decided], outcomes)] == [
        (A, 0, 0.5),
        (A, 1, 0.5),
        (B, 0, -0.5),
    ]
    with pytest.raises(ValueError, match="samples are not in the journal"):
        survivors([decided], Outcomes())


def test_a_branch_without_a_token_of_its_own_is_no_sample():
    outcomes = Outcomes()
    for seq, event in enumerate([verified(A, 1.0), trajectory(A, branches=2), trajectory(A, branch=1, branches=2, sampled=0)]):
        outcomes.on(Recorded(seq, 0.0, event))
    kept = ev.AttemptDecision(attempt=A, fate=ev.Fate.TRAINED, advantage=0.5)
    decided = ev.GroupDecided(run=RUN, step=0, group=0, domain="fix", kept=True, attempts=(kept,))
    assert [s.merged.branch for s in survivors([decided], outcomes)] == [0]
