"""An event as a line tells who, what and how much; bytes are told by their size and never shown."""

from __future__ import annotations

import json

import msgspec
import pytest

from rl360.bus import events as ev
from rl360.bus.codec import Message, Recorded
from rl360.bus.payload import Payload
from rl360.journal.lines import Filter, json_line, line
from rl360.journal.listing import Listing, amount
from rl360.journal.source import JournalError
from tests.journal.runs import message
from tests.launch import story

INLINE, STORED = story.payload([1.0, 2.0], "<f4"), Payload(size=2_000_000, digest="ab" * 32)


def turn(**new: object) -> Message:
    return message(Recorded(7, 1_700_000_000.25, msgspec.structs.replace(story.turn(1, 3.0), **new)))


def newer(body: bytes) -> Message:
    return Message(8, 1, "rl360.story.ev.2.NewEvent._", "", "", "", body)


def test_a_line_says_who_and_how_much_and_shows_no_bytes() -> None:
    text = line(turn(prompt_ids=STORED, logprobs=INLINE))
    assert text.split()[0] == "7" and text.split()[2:5] == ["0", "TurnCompleted", f"{story.GOOD}.1"]
    assert "prompt_ids=<2.0 MB>" in text and "logprobs=<8 B>" in text and "spans=[1]" in text and "turn=1" in text
    assert len(text.splitlines()) == 1


def test_json_has_every_field_and_sizes_for_bytes() -> None:
    data = json.loads(json_line(turn(prompt_ids=STORED, logprobs=INLINE)))
    assert (data["seq"], data["time"], data["type"], data["attempt"]) == (7, 1_700_000_000.25, "TurnCompleted", story.GOOD)
    assert data["prompt_ids"] == {"size": 2_000_000, "digest": "ab" * 32} and data["logprobs"] == {"size": 8}
    assert set(ev.TurnCompleted.__struct_fields__) <= data.keys()


@pytest.mark.parametrize("event", story.events(), ids=lambda e: type(e).__name__)
def test_every_event_fits_a_line_and_json(event: ev.AnyEvent) -> None:
    m = message(Recorded(1, 1.0, event))
    assert type(event).__name__ in line(m)
    assert json.loads(json_line(m))["run"] == story.RUN


def test_a_newer_type_and_a_broken_body_are_said() -> None:
    body = msgspec.msgpack.encode({"type": "NewEvent", "run": "story", "step": 2, "data": b"xyz", "n": 5})
    assert "data=<3 B> n=5 (not known to this version)" in line(newer(body))
    assert json.loads(json_line(newer(body)))["data"] == {"size": 3}
    assert "unreadable=" in line(newer(b"\xc1"))


def test_filters_choose_by_type_step_and_attempt() -> None:
    messages = [message(r) for r in story.records()]
    assert [subject(m) for m in messages if Filter(types=("StepOpened", "StepClosed")).shows(m)] == ["StepOpened", "StepClosed"]
    assert [subject(m) for m in messages if Filter(step=-1).shows(m)] == ["RunStarted"]
    of_lost = [subject(m) for m in messages if Filter(attempt=story.LOST).shows(m)]
    assert of_lost == ["RolloutRequested", "InfraFailed"]
    assert Filter(attempt="t12-g003-a5", types=("InfraFailed",)).patterns("r") == ["rl360.r.ev.12.InfraFailed.003"]
    assert Filter().patterns("r") == ["rl360.r.ev.*.*.*"]
    with pytest.raises(JournalError, match="names look like t3-g004-a1"):
        Filter(attempt="x").patterns("r")


def subject(m: Message) -> str:
    return m.subject.split(".")[4]


def test_a_listing_counts_by_step_and_says_what_is_pinned_pruned_and_unknown() -> None:
    listing = Listing()
    pruned = ev.BlobsPruned(run="story", first=0, last=0, kept=(), blobs=1, blob_bytes=1, checkpoints=(), checkpoint_bytes=0)
    for m in [*map(message, story.records()), turn(prompt_ids=STORED), message(Recorded(30, 9.0, pruned)), newer(b"\x80")]:
        listing.on(m)
    text = list(listing.lines("story", {2}, lambda digest: 2_000_000))
    assert text[0].startswith("run story: 19 events")
    rows = {row.split()[0]: row for row in text[2:] if row[:6].strip()}
    assert rows["0"].endswith("pruned") and rows["2"].endswith("pinned") and " 2.0 MB" in rows["0"]
    assert rows["-"].split()[1:4] == ["2", "1", "30"]
    assert "TurnCompleted 3" in "\n".join(text)
    assert text[-1].endswith("skipped by what reads them: NewEvent 1")


def test_bytes_for_people() -> None:
    assert [amount(n) for n in (0, 999, 1000, 65_393_278, 2_500_000_000)] == ["0 B", "999 B", "1.0 kB", "65.4 MB", "2.5 GB"]
