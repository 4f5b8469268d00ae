"""What a user types wrong is one line that names the place and the remedy, before anything starts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl360.cli import main
from rl360.config import Config
from rl360.errors import told, writing
from rl360.launch.rundir import RunDir, under_way

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
        (["push", "plan", RECIPE, "--direct-rate", "4"], "give that as well"),
        (["audit", RECIPE], "not the folder of a run"),
        (["warmstart", RECIPE], "tiny.toml: File exists; name another place"),
        (["warmstart", "/proc/x"], "/proc/x: No such file or directory; check the path"),
        (["run", RECIPE, "--dir", RECIPE], "Not a directory; name another place"),
        (["schemas", "--out", RECIPE], "tiny.toml: File exists; name another place"),
        (["journal", "import", "nowhere.zip", "/proc/x"], "/proc/x: No such file or directory; check the path"),
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
        (["push", "plan", RECIPE, "--broadcast-rate", "nan"], "'nan' is no finite number"),
        (["push", "plan", RECIPE, "--broadcast-rate", "-1"], "'-1' is no rate: give a number above 0"),
        (["push", "plan", RECIPE, "--broadcast-rate", "0"], "'0' is no rate"),
        (["push", "plan", RECIPE, "--direct-rate", "inf"], "'inf' is no finite number"),
        (["push", "plan", RECIPE, "--call-seconds", "-1"], "'-1' is no duration: give seconds, from 0 on"),
        (["journal", "tail", "run", "--type", "StepTraind"], "no event is called 'StepTraind'; did you mean StepTrained?"),
        (["journal", "tail", "run", "--type", "Nope"], "known: BlobsPruned, "),
        (["explain", "run", "--step", "1", "--journal", "a.b"], "run name 'a.b'"),
        (["worker", "filter", "--dir", "run", "--journal", ""], "run name ''"),
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


def test_what_is_written_under_another_name_first_is_told_by_the_name_that_the_user_gave(tmp_path: Path) -> None:
    out = tmp_path / "none" / "out"
    with pytest.raises(FileNotFoundError) as told_so, writing(out):
        (tmp_path / "none" / ".out.1.tmp").write_text("x")
    assert told(told_so.value) == f"{out}: No such file or directory; {told(told_so.value).partition('; ')[2]}"
    with pytest.raises(FileNotFoundError, match="elsewhere"), writing(out):
        (tmp_path / "elsewhere").read_text()


@pytest.mark.parametrize("number", [n for n in errno.errorcode if n != errno.EPIPE])
def test_every_error_of_a_place_names_the_place_and_a_remedy(number: int) -> None:
    place, _, remedy = told(OSError(number, os.strerror(number), "/some/place")).partition("; ")
    assert place == f"/some/place: {os.strerror(number)}" and remedy


def test_a_reader_that_has_enough_of_the_output_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rl360", "doctor"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'nats', 'msgspec'} & set(sys.modules)"
    code = f"import sys; from rl360.cli import build_parser; build_parser().format_help(); print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "set()\n"


def test_explain_imports_only_what_reads_a_journal() -> None:
    """It answers in under a second, most of which is imports: a list of everything that may go wrong once doubled them."""
    code = (
        "import sys; from rl360.cli import main; main(['explain', 'nowhere', '--step', '1'])\n"
        "import rl360.launch.decide_again\n"
        "print(sorted({'torch', 'openai', 'minisweagent', 'rl360.launch.lead', 'rl360.agents.runner'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "[]\n"


def test_runs_that_are_under_way_beside_a_new_one_are_known(tmp_path: Path) -> None:
    """They share the machine: both get slower, which nobody would guess from a folder's name."""
    for name in ("old", "tiny", "tiny-2"):
        RunDir(tmp_path / name).create(Config())
        (tmp_path / name / "children.json").write_text('{"trainer": 1}')  # what a killed run leaves as well
    worker = subprocess.Popen([sys.executable, "-c", "input()", f"--dir={tmp_path / 'tiny'}"], stdin=subprocess.PIPE, process_group=0)
    try:
        assert under_way(tmp_path, besides=tmp_path / "tiny-2") == [tmp_path / "tiny"]
        assert under_way(tmp_path, besides=tmp_path / "tiny") == []
    finally:
        worker.communicate(b"\n", timeout=20)


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
