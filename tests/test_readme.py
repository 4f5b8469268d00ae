"""What the README and the other pages show can be typed, as it stands (CASES 44)."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from rl360.cli import build_parser
from rl360.config import Config, load, parse
from rl360.replay.rules import ReplayRules, read_rules

ROOT = Path(__file__).parents[1]
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.S) for line in block.splitlines()]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "compose" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = [(page, kind, text) for page in PAGES for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)]
TYPED = [line.removeprefix("$ ") for _, kind, text in SHOWN if kind in ("", "console") for line in text.splitlines()]
KEPT = [pytest.param(text, id=f"{page.stem}-{text.split()[0]}") for page, kind, text in SHOWN if kind == "toml"]


@pytest.mark.parametrize("command", [c for c in TYPED if c.startswith("rl360 ")])
def test_every_rl360_command_of_the_docs_is_understood(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    args = build_parser().parse_args(["1" if word == "N" else word for word in words])
    if recipe := getattr(args, "recipe", None):
        load(ROOT / recipe, tuple(getattr(args, "overrides", ())))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_every_make_target_of_the_readme_exists(command: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert shlex.split(command)[1] in targets


@pytest.mark.parametrize("text", KEPT)
def test_every_recipe_that_the_docs_show_is_accepted(text: str, tmp_path: Path) -> None:
    if text.startswith("# rules.toml"):
        (tmp_path / "rules.toml").write_text(text)
        read_rules(ReplayRules.of(Config()), str(tmp_path / "rules.toml"), ())
    else:
        parse(tomllib.loads(text))


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
