"""A gradient replay of a step that retention has removed says so, in one line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl360.cli import main
from tests.journal.runs import lay_down, play


def test_a_gradient_of_a_pruned_step_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = asyncio.run(lay_down(play(tmp_path / "world", steps=5), tmp_path / "run"))
    assert main(["journal", "prune", str(run), "--keep-steps", "1"]) == 0
    capsys.readouterr()
    assert main(["replay", str(run), "--step", "1", "--gradient"]) == 2
    err = capsys.readouterr().err
    assert "step 1 was pruned by retention: replay it without --gradient" in err and len(err.strip().splitlines()) == 1
