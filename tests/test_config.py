"""A recipe that can't run is refused before anything starts, with the key, the reason and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.config import Config, ConfigError, load, parse, to_toml_data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"trainer": {"lrr": 1.0}}, "did you mean trainer.lr[?]"),
        ({"steps": 3}, "unknown key 'steps'.*run.steps"),
        ({"run": {"steps": "many"}}, "run.steps"),
        ({"run": {"steps": 0}}, "run.steps"),
        ({"run": {"name": "a b"}}, "run.name"),
        ({"run": {"schedule": "async"}}, "run.schedule"),
        ({"budgets": {"outer": 10.0}}, r"budgets.outer.*\(S15\)"),
        ({"trainer": {"loss_reduction": "constant"}}, "trainer.loss_constant"),
        ({"trainer": {"loss_constant": 5.0}}, "has no effect"),
        ({"trainer": {"tis_floor": 3.0}}, "trainer.tis_floor"),
        ({"run": {"schedule": "one_step"}, "trainer": {"max_staleness": 0}}, r"max_staleness.*S24"),
        ({"sampling": {"max_new_tokens": 600}}, "sampling.max_new_tokens"),
        ({"tasks": {"pool": 4}}, "tasks.pool"),
        ({"tasks": {"attempts_per_group": 1}}, "tasks.attempts_per_group"),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature"),
        ({"engine": {"sglang": {"tp": 2}}}, "engine.sglang.*no effect"),
        ({"engine": {"kind": "sglang", "sglang": {"tp": 4, "ep": 3}}}, "engine.sglang.ep"),
        ({"engine": {"kind": "sglang", "sglang": {"args": ["--tp-size=2"]}}}, "--tp-size=2 is set by RL360"),
        ({"engine": {"kind": "sglang", "sglang": {"gpus": 2}}}, "unknown key 'engine.sglang.gpus'"),
        ({"push": {"path": "shared_memory"}}, "push.path"),
    ],
)
def test_bad_recipe_names_key_and_reason(data: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(data)


def test_s15_cases_37_an_outer_deadline_below_the_phases_is_refused() -> None:
    config = parse({})
    b = config.budgets
    total = b.queue + b.setup + b.agent + b.verify + b.collect + b.margin
    assert parse({"budgets": {"outer": total}}).budgets.outer == total
    with pytest.raises(ConfigError, match="S15"):
        parse({"budgets": {"outer": total - 1}})


def test_malformed_toml_names_the_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[run\nname = 1")
    with pytest.raises(ConfigError, match=r"r.toml: not valid TOML.*line 1"):
        load(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml"):
        load(tmp_path / "none.toml")


def test_overrides_apply_and_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[run]\nsteps = 3\n")
    config = load(path, ("run.steps=7", "run.name=abc", "trainer.betas=[0.9, 0.99]"))
    assert (config.run.steps, config.run.name, config.trainer.betas) == (7, "abc", (0.9, 0.99))
    for bad, says in (("run.steps", "section.key=value"), ("run.stepz=1", "stepz"), ("run.steps.x=1", "not a section")):
        with pytest.raises(ConfigError, match=says):
            load(path, (bad,))


def test_a_recorded_recipe_reads_back_equal() -> None:
    config = Config()
    assert parse(to_toml_data(config)) == config


def test_kept_recipes_load() -> None:
    for path in (Path(__file__).parents[1] / "recipes").glob("*.toml"):
        load(path)
