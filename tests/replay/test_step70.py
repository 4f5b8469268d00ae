"""The recorded step 70: what the journal explains, and what each set of rules makes of it."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from rl360.bus import events as ev
from rl360.cli import main
from rl360.config import ConfigError
from rl360.replay.compare import compare
from rl360.replay.decide import decide_step
from rl360.replay.effects import effects
from rl360.replay.explain import explain
from rl360.replay.facts import StepFacts
from rl360.replay.page import render
from rl360.replay.reproduce import reproduce
from rl360.replay.rules import PRESETS, ReplayRules, preset, read_rules
from rl360.replay.text import lines
from tests.replay.conftest import STEP70

SCALE, SHIFT = 33 / 56, 0.75 * 23 / 56


def recorded(facts: StepFacts) -> ReplayRules:
    return ReplayRules.of(facts.config)


def test_explain_json_gives_the_published_numbers_under_both_rules(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(STEP70), "--step", "70", "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    legacy, ours = rules["legacy"], rules["rl360"]
    assert (round(legacy["gradient_scale"], 3), round(legacy["advantage_shift"], 2)) == (0.589, 0.31)
    assert (round(legacy["baseline"], 2), legacy["kept_mean"]) == (0.44, 0.75)
    assert round(legacy["logged_mean"], 2) == 0.49
    assert legacy["tis_factor"] == pytest.approx(1 - 23 / 56)
    assert (ours["gradient_scale"], ours["kept_mean"], ours["baseline"]) == (1, 0.75, 0.75)
    assert ours["advantage_shift"] == pytest.approx(0, abs=1e-12)
    assert rules["recorded"] == ours


def test_the_first_line_is_the_alarm_in_words_and_numbers(step70: StepFacts):
    first = next(lines(explain(step70)))
    assert first.startswith("ALARM  23 of 56 kept samples lost to infrastructure")
    assert "gradient would be × 0.59 and advantages +0.31" in first


def test_attempts_are_explained_by_cause_node_and_image(step70: StepFacts):
    e = explain(step70)
    assert e.counts["requested"] == e.counts["valid"] + e.counts["masked"] + e.counts["stale"] == 256
    assert sum(lost.n for lost in e.lost) == e.counts["infra"] == 123
    for lost in e.lost:
        assert sum(lost.nodes.values()) == lost.n, "each says where"
        assert sum(lost.images.values()) == lost.n
    assert {lost.cause for lost in e.lost} == {"sandbox/lost", "verifier/no_reward", "verifier/timeout"}


def test_shares_of_the_gradient_add_up_to_one(step70: StepFacts):
    e = explain(step70)
    assert sum(g.share for g in e.groups) == pytest.approx(1)
    assert sum(e.domains.values()) == pytest.approx(1)
    assert all(g.share == 0 for g in e.groups if not g.kept)


def test_every_recorded_decision_is_reproduced(step70: StepFacts):
    made = reproduce(step70)
    assert made.differences == ()
    assert made.checked == 32 + 256 + 4 + 1


def test_the_first_decision_that_differs_is_named(step70: StepFacts):
    decided = dict(step70.decided)
    decided[3] = msgspec.structs.replace(decided[3], baseline=0.5)
    trained = msgspec.structs.replace(step70.trained, divisor=1.0)
    changed = msgspec.structs.replace(step70.closed, kept=1)
    facts = StepFacts(**{**vars(step70), "decided": decided, "trained": trained, "closed": changed})
    found = [str(d) for d in reproduce(facts).differences]
    assert re.match(r"event \d+, group 3 baseline: recorded 0.5, decided again 0.75", found[0])
    assert any("divisor: recorded 1.0" in d for d in found)
    assert any("step's counts kept: recorded 1" in d for d in found)
    assert explain(facts).alarms[0].startswith("3 recorded decisions do not follow from the journal")


def test_step70_under_miles_and_slime(step70: StepFacts):
    miles = decide_step(step70, preset(recorded(step70), "miles"))
    assert (miles.kept_samples, len(miles.lost), miles.divisor) == (56, 23, 56)
    assert effects(miles, miles).gradient_scale == pytest.approx(SCALE)
    slime = decide_step(step70, preset(recorded(step70), "slime"))
    assert sum(g.kept for g in slime.groups) == 32, "a failure scored 0 disagrees with every pass: no group is dropped"
    assert len(slime.lost) == 123


def test_a_batch_in_which_no_group_was_dropped_has_group_baselines_even_under_miles(step70: StepFacts):
    """The fallback to a baseline of the whole batch is for a batch that is not full."""
    slime = decide_step(step70, preset(recorded(step70), "slime"))
    assert {g.baseline for g in slime.groups} != {slime.groups[0].baseline}, "slime kept all: each group has its own"


def test_two_decisions_side_by_side(step70: StepFacts):
    ours = reproduce(step70).decision
    legacy = decide_step(step70, preset(recorded(step70), "legacy"))
    c = compare(ours, legacy, ("recorded", "legacy"))
    assert c.groups_kept == (7, 7) and c.only == ((), ()) and c.fates == ()
    assert c.advantage_change_mean == pytest.approx(SHIFT)
    assert c.divisors == (1920, 56)
    same = compare(ours, ours, ("recorded", "recorded"))
    assert (same.norm_ratio, same.cosine) == (pytest.approx(1), pytest.approx(1))
    assert same.changed == {}


def test_the_divisor_alone_scales_and_does_not_turn_the_gradient(step70: StepFacts):
    one = decide_step(step70, read_rules(recorded(step70), "", ["loss_reduction=sample_mean"]))
    counted = decide_step(step70, read_rules(recorded(step70), "", ["loss_reduction=sample_mean", "failures_in_divisor=counted"]))
    c = compare(one, counted, ("a", "b"))
    assert c.norm_ratio == pytest.approx(SCALE)
    assert c.cosine == pytest.approx(1)


def test_a_stricter_bound_on_staleness_makes_attempts_stale_and_skips_the_step(step70: StepFacts):
    strict = decide_step(step70, read_rules(recorded(step70), "", ["max_staleness=0"]))
    assert strict.batch.refs == () and "stale" in strict.batch.why
    assert {a.fate for g in strict.groups for a in g.attempts} == {ev.Fate.STALE, ev.Fate.MASKED}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_decides_the_step(step70: StepFacts, name: str):
    decision = decide_step(step70, preset(recorded(step70), name))
    assert len(decision.groups) == 32
    assert decision.divisor > 0


def test_rules_come_from_a_file_on_top_of_a_preset(step70: StepFacts, tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text('preset = "miles"\nfailures_in_divisor = "out"\n')
    rules = read_rules(recorded(step70), str(file), ["tis_cap=3.0"])
    assert (rules.baseline, rules.failures_in_divisor, rules.tis_cap) == ("batch_unless_full", "out", 3.0)


@pytest.mark.parametrize(
    ("with_", "overrides", "says"),
    [
        ("", ["tis_cp=1"], "did you mean tis_cap"),
        ("", ["filter=sometimes"], "filter"),
        ("", ["max_staleness=-1"], "max_staleness"),
        ("missing.toml", [], "can't be read"),
        ("", ["loss_reduction=constant"], "loss_constant"),
    ],
)
def test_wrong_rules_are_refused_with_key_and_remedy(step70: StepFacts, with_: str, overrides: list[str], says: str):
    with pytest.raises(ConfigError, match=says):
        read_rules(recorded(step70), with_, overrides)


def test_the_page_stands_alone_and_escapes_what_the_journal_says(step70: StepFacts):
    e = explain(step70)
    group = msgspec.structs.replace(e.groups[0], task="<script>alert(1)</script>")
    page = render(msgspec.structs.replace(e, groups=(group, *e.groups[1:])))
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.search(r'(src|href)="', page), "nothing is fetched"
    assert "23 of 56 kept samples" in page
    assert page.count('class="infra" x=') == 123


def test_a_step_that_the_journal_lacks_is_one_clear_line(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(STEP70), "--step", "3"]) == 2
    assert "step 70 alone, not 3" in capsys.readouterr().err
