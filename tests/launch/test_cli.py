"""What a user types wrong is one line that names the place and the remedy, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.cli import main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "tiny.toml")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "name a recipe"),
        (["run", "none.toml"], "none.toml"),
        (["run", RECIPE, "--set", "trainer.lrr=1"], "did you mean trainer.lr"),
        (["run", RECIPE, "--steps", "0"], "run.steps"),
        (["run", RECIPE, "--resume", "x"], "leave the recipe"),
        (["run", RECIPE, "--set", "policy.path=none"], "policy.path: none lacks config.json"),
        (["export", "nowhere", "out"], "nowhere"),
        (["run", "--resume", "nowhere"], "not the folder of a run"),
        (["worker", "trainr", "--dir", "."], "unknown worker kind"),
        (["worker", "filter", "--dir", "nowhere"], "not the folder of a run"),
        (["audit", "nowhere"], "not the folder of a run"),
        (["trace", "nowhere", "t0-g000-a0"], "not the folder of a run"),
        (["push", "plan", RECIPE, "--set", "policy.path=nowhere"], "nowhere/config.json"),
        (["chaos", RECIPE, "--dir", "/etc"], "/etc is not empty"),
        (["chaos", RECIPE, "--only", "engin0"], "--only engin0: nothing of this recipe"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capsys.readouterr().err.strip()
    assert says in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "runs").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay", "run", "--step", "1", "--into", "../../x"], "run name '../../x'"),
        (["replay", "run", "--picture", "x.bmp"], "must end in .svg or .png"),
        (["summary", "run", "--picture", "x.xyz"], "must end in .svg or .png"),
        (["journal", "tail", "run", "--lines", "-5"], "is no number from 1 on"),
        (["chaos", RECIPE, "--kills", "0"], "is no number from 1 on"),
    ],
)
def test_an_option_that_can_not_be_is_refused_by_name(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert says in err.splitlines()[-1] and "Traceback" not in err


def test_a_file_that_can_not_be_read_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.json").mkdir()  # root may read anything but this
    assert main(["audit", str(tmp_path)]) == 2
    err = capsys.readouterr().err.strip()
    assert str(tmp_path / "recipe.json") in err
    assert len(err.splitlines()) == 1


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rl360.config import Config
    from rl360.launch.rundir import RunDir

    RunDir(tmp_path).create(Config())
    assert main(["run", RECIPE, "--dir", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err


def test_damaged_recipe_of_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.json").write_text("{")
    assert main(["run", "--resume", str(tmp_path)]) == 2
    assert "recipe.json is damaged" in capsys.readouterr().err


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    from rl360.config import parse
    from rl360.extras import MissingExtra
    from rl360.launch.kinds import load

    real = builtins.__import__

    def without_torch(name: str, *args, **kwargs):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    for module in [m for m in __import__("sys").modules if m.startswith("rl360.engines.tiny")]:
        monkeypatch.delitem(__import__("sys").modules, module)
    with pytest.raises(MissingExtra, match=r"rl360\[tiny\]"):
        load("engine", parse({}))
