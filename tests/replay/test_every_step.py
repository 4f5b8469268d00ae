"""A whole run decided again, a line a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl360.cli import main
from tests.journal.runs import lay_down, play
from tests.replay.conftest import STEP70


async def laid(tmp_path: Path) -> Path:
    return await lay_down(play(tmp_path / "world"), tmp_path / "run")


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    return await laid(tmp_path)


def test_every_step_of_a_run_is_reproduced_and_set_beside_other_rules(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["replay", str(run), "--with", "legacy", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert all(r["differences"] == [] and r["recorded"]["gradient_scale"] == 1 for r in rows)
    assert all(r["infra"] and r["other"]["gradient_scale"] < 1 for r in rows), "an attempt of every group is lost in this world"


def test_the_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "p.svg"
    assert main(["replay", str(STEP70), "--with", "legacy", "--picture", str(picture)]) == 0
    assert "× 0.589" in capsys.readouterr().out
    assert picture.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("option", [["--into", "x"], ["--gradient"], ["--journal", "x"]])
def test_what_is_about_one_step_asks_for_it(option: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["replay", str(STEP70), *option]) == 2
    assert "name it with --step" in capsys.readouterr().err
