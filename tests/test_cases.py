"""`docs/cases.md` is true: every case once, each proven by a test that is there, and no number in code or tests that it lacks."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COUNT = 44
LINES = (ROOT / "docs" / "cases.md").read_text().splitlines()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in LINES if line.startswith("| ")]


def cases() -> dict[int, list[str]]:
    """Number of a case and the tests that prove it. A row without a number goes on with the case above it."""
    found: dict[int, list[str]] = {}
    number = 0
    for first, *texts, proof in ROWS:
        if first.isdecimal():
            number = int(first)
            assert number not in found, f"case {number} is there twice"
            assert len(texts) == 2 and all(texts), f"case {number}: it must say what went wrong and what RL360 does"
            found[number] = []
        elif first:
            continue  # the head of a table
        found.setdefault(number, []).extend(re.findall(r"`(tests/[^`]+)`", proof))
    return found


@cache
def names_in(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_")}


def numbers_in(text: str) -> set[int]:
    """Of the cases that are named in a text, ranges written out."""
    found: set[int] = set()
    for said in re.findall(r"CASES? (\d+(?:(?:, | and | to )\d+)*)", text):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", said):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def test_every_case_is_there_once() -> None:
    assert list(cases()) == list(range(1, COUNT + 1))


@pytest.mark.parametrize(("number", "proofs"), cases().items())
def test_every_case_is_proven_by_a_test_that_is_there(number: int, proofs: list[str]) -> None:
    assert proofs, f"case {number} names no test"
    for proof in proofs:
        file, _, name = proof.partition("::")
        assert (ROOT / file).is_file(), proof
        assert name in names_in(ROOT / file), proof


def test_every_number_that_code_and_tests_say_is_in_the_list() -> None:
    for folder in ("rl360", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            assert numbers_in(file.read_text()) <= cases().keys(), file
            for name in names_in(file):
                said = {int(n) for n in re.findall(r"cases?_?(\d+)(?=_)", name)}
                assert said <= cases().keys(), f"{file}: {name}"


def test_ranges_of_numbers_are_read() -> None:
    assert numbers_in("CASES 1; S9, CASES 18 and 20 to 22, 31) and 7") == {1, 18, 20, 21, 22, 31}
