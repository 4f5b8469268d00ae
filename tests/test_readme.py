"""Everything the README says can be typed (CASES 44)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rl360.cli import build_parser
from rl360.config import load

ROOT = Path(__file__).parents[1]
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.S) for line in block.splitlines()]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("rl360 ")])
def test_every_rl360_command_of_the_readme_is_understood(command: str) -> None:
    args = build_parser().parse_args(shlex.split(command)[1:])
    recipe = getattr(args, "recipe", None)
    if recipe is not None:
        load(ROOT / recipe, tuple(args.overrides))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_every_make_target_of_the_readme_exists(command: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert shlex.split(command)[1] in targets


def test_the_readme_has_commands_and_links_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(COMMANDS) >= 8
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_operations_lists_every_command() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for name in build_parser()._subparsers._group_actions[0].choices:  # type: ignore[union-attr]
        assert f"`rl360 {name}" in text, name


def test_rules_name_files_that_exist() -> None:
    for name in set(re.findall(r"`([a-z_]+/[a-z_]+\.py)`", (ROOT / "docs" / "rules.md").read_text())):
        assert (ROOT / "rl360" / name).exists(), name
