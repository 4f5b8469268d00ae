"""Journals that older versions recorded stay readable, auditable and decidable, to the bit (`scripts/record_journal.py`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from rl360.audit import audit
from rl360.bus.codec import Message
from rl360.cli import main
from rl360.journal import exporting, importing
from rl360.journal.archive import ArchiveSource
from rl360.replay.facts import facts_of
from rl360.replay.reproduce import reproduce
from tests.journal.runs import MemorySource

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = {
    "journal-v1/tiny.zip": {"steps": 2, "InfraFailed": 2, "TurnCompleted": 105, "RoutingDelta": 0},
    "journal-v1/tiny-moe.zip": {"steps": 2, "InfraFailed": 3, "TurnCompleted": 100, "RoutingDelta": 100},
}


@pytest.fixture(params=RECORDED)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, int]]:
    importing.lay_down(FIXTURES / request.param, tmp_path / "run")
    return tmp_path / "run", RECORDED[request.param]


def test_every_recorded_journal_is_tried() -> None:
    assert {str(p.relative_to(FIXTURES)) for p in FIXTURES.glob("journal-v*/*.zip")} == set(RECORDED)


async def test_it_is_read_whole_audits_clean_and_decides_the_same_to_the_bit(recorded: tuple[Path, dict[str, int]]) -> None:
    folder, expected = recorded
    source = ArchiveSource(folder)
    journal = await source.read()
    counts = Counter(type(r.event).__name__ for r in journal.records)
    assert len(journal.records) == source.manifest.messages and not journal.unread
    assert {k: counts[k] for k in expected if k != "steps"} == {k: n for k, n in expected.items() if k != "steps"}
    assert audit(journal, source.blobs) == []
    for step in range(expected["steps"]):
        facts = facts_of(await source.records({step}), step)
        made = reproduce(facts)
        assert made.differences == () and made.checked > 20
        assert facts.trained is not None and not facts.trained.skipped


async def with_newer_event(folder: Path, file: Path) -> Message:
    """Export what was imported, with one more event, of a type that this version doesn't know."""
    source = ArchiveSource(folder)
    messages = [m async for m in source.messages()]
    body = msgspec.msgpack.encode({"type": "NewEvent", "run": source.run, "step": 1})
    newer = Message(len(messages) + 1, messages[-1].nanos + 1, f"rl360.{source.run}.ev.1.NewEvent._", "id", "2", "", body)
    recipe = (folder / "recipe.json").read_bytes()
    mixed = MemorySource([*messages, newer], source.blobs, run=source.run)
    await exporting.write(mixed, file, recipe=recipe, steps=None, folders={})
    return newer


def test_an_event_of_a_newer_version_is_counted_skipped_and_said(
    recorded: tuple[Path, dict[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = asyncio.run(with_newer_event(recorded[0], tmp_path / "newer.zip"))
    there = importing.lay_down(tmp_path / "newer.zip", tmp_path / "newer")
    read = asyncio.run(ArchiveSource(tmp_path / "newer").read())
    assert (read.unknown, len(read.records)) == ({newer.seq: "NewEvent"}, there.messages - 1)
    for command, said in (
        (["journal", "ls"], "skipped by what reads them: NewEvent 1"),
        (["audit"], "1 events of type NewEvent, which this version of RL360 doesn't know, were skipped"),
    ):
        assert main([*command, str(tmp_path / "newer")]) == 0
        assert said in capsys.readouterr().out
