"""A recipe that can't run is refused before anything starts, with the key, the reason and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from rl360.config import Config, ConfigError, Section, load, parse, to_toml_data
from rl360.replay.rules import ReplayRules, read_rules


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
        ({"waves": {"max_pulls": 1}, "runners": {"count": 2}}, "waves.max_pulls.*each runner has a share"),
        ({"runners": {"memory_mb": 500}}, "runners.memory_mb.*one sandbox of 512 MiB"),
        ({"runners": {"cpus": 0.5}}, "runners.cpus.*sandbox.cpus is 1"),
    ],
)
def test_bad_recipe_names_key_and_reason(data: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(data)


def keys(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a recipe that holds a value."""
    for name, hint in get_type_hints(section).items():
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from keys(hint, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("key", [*keys(Config)], ids=".".join)
def test_a_wrong_type_names_key_value_what_it_takes_and_the_default(key: tuple[str, ...]) -> None:
    wrong: Any = {"no": ["such", "thing"]}
    data = wrong
    for part in reversed(key):
        data = {part: data}
    with pytest.raises(ConfigError) as refused:
        parse(data)
    name = ".".join(key)
    said = re.escape(f"recipe: {name}") + r"(\[\.\.\.\] has a wrong entry| can't be \{.*\}): it takes [a-z\[].+"
    assert re.fullmatch(said, str(refused.value)), refused.value
    assert "(the default: " in str(refused.value) or "[...]" in str(refused.value)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ("run.steps=abc", 'run.steps can\'t be "abc": it takes a whole number, at least 1 (the default: 25)'),
        ("run.schedule=foo", 'run.schedule can\'t be "foo": it takes one of "one_step", "sync" (the default: "sync")'),
        ('trainer.betas=[0.1, "a"]', 'trainer.betas[1] can\'t be "a": it takes a number, at least 0, below 1'),
        ("faults=[{step=1}]", 'faults[0].kind is missing: it takes one of "engine_hang", '),
        ("run=3", "run can't be 3: it takes a section with name, seed, steps, schedule"),
    ],
)
def test_a_wrong_value_is_told_with_the_option_that_brought_it(item: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[run]\nsteps = 3\n")
    with pytest.raises(ConfigError, match=re.escape(f"r.toml --set {item}: {says}")):
        load(path, (item,))


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


def _floats(kind: type = Config, path: tuple[str, ...] = ()) -> list[str]:
    """Every key of a recipe that takes a float, tuples' entries left out."""
    found: list[str] = []
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found += _floats(field.type, (*path, field.encode_name))
        elif isinstance(field.default, float):
            found.append(".".join((*path, field.encode_name)))
    return found


@pytest.mark.parametrize("key", _floats())
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
def test_every_float_of_a_recipe_is_finite(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[run]\nsteps = 3\n")
    with pytest.raises(ConfigError, match=rf"{key}: .* is not finite"):
        load(path, (f"{key}={value}",))
    section, _, name = key.rpartition(".")
    path.write_text(f"[{section}]\n{name} = {value.replace('1e999', '1e+999')}\n")
    with pytest.raises(ConfigError, match=rf"{key}: .* is not finite"):
        load(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"trainer": {"betas": [float("nan"), 0.9]}}, r"trainer.betas\[0\]: nan is not finite"),
        ({"trainer": {"betas": [1.0, 0.9]}}, r"trainer.betas\[0\]"),
        ({"faults": [{"step": 0, "kind": "engine_kill", "fraction": float("inf")}]}, r"faults\[0\].fraction: inf is not finite"),
        ({"run": {"seed": 10**30}}, "run.seed: the integer does not fit into 64 bits"),
        ({"policy": {"path": "a\0b"}}, "policy.path: a NUL"),
        ({"tasks": {"source": "\udcff"}}, "tasks.source: .* half a UTF-16 pair"),
    ],
)
def test_what_a_recorded_recipe_can_not_hold_is_refused(data: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(data)


@pytest.mark.parametrize("text", [b"", b"# nothing\n", b"\xff\xfe"])
def test_a_recipe_that_says_nothing_or_is_no_text_is_refused_with_the_sections_of_one(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"r.toml: .*; a recipe is TOML with sections of run, tasks, policy"):
        load(path, ("run.steps=3",))


@pytest.mark.parametrize("text", ["", "# nothing"])
def test_a_file_of_rules_that_says_nothing_is_refused_with_the_rules_there_are(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--with .*rules.toml: is empty; .*agent_timeout.* slime"):
        read_rules(ReplayRules(), str(path), ())
    with pytest.raises(ConfigError, match="eps_low: inf is not finite"):
        read_rules(ReplayRules(), "", ("eps_low=inf",))
