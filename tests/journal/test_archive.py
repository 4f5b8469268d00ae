"""A journal in one file is the journal: same events, sequences and times; and what is not whole is refused and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import zipfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.bus import events as ev
from rl360.bus import selection, subjects
from rl360.bus.blobs import BlobMissing
from rl360.bus.codec import Message
from rl360.journal import exporting, importing
from rl360.journal.archive import ArchiveSource
from rl360.journal.manifest import MANIFEST
from rl360.journal.segments import SegmentWriter, decode, in_order
from rl360.journal.source import JournalError, Source
from tests.journal.runs import LETTER, MemorySource, message, play, with_checkpoints
from tests.trainer.world import RUN, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return play(tmp_path_factory.mktemp("world"))


async def write(source: Source, file: Path, steps: set[int] | None = None, folders: dict[str, Path] | None = None):
    return await exporting.write(source, file, recipe=b'{"run":{"name":"world"}}', steps=steps, folders=folders or {})


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported file."""
    file = tmp_path_factory.mktemp("file") / "world.zip"
    asyncio.run(write(MemorySource.of(world, [LETTER]), file))
    return file


async def test_an_imported_journal_is_the_one_that_was_exported(world: World, whole: Path, tmp_path: Path) -> None:
    importing.lay_down(whole, tmp_path / "run")
    source = ArchiveSource(tmp_path / "run")
    exported = MemorySource.of(world)
    assert [m async for m in source.messages()] == [m async for m in exported.messages()]
    assert await source.records() == await exported.records()
    assert await source.dead_letters() == [LETTER]
    blobs = {p.name for p in world.blobs.root.rglob("*") if p.is_file()}
    assert blobs and {p.name for p in (tmp_path / "run" / "blobs").rglob("*") if p.is_file()} == blobs
    assert [source.blobs.get(d) for d in sorted(blobs)] == [world.blobs.get(d) for d in sorted(blobs)]


async def test_the_same_journal_gives_the_same_file(world: World, whole: Path, tmp_path: Path) -> None:
    await write(MemorySource.of(world, [LETTER]), tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == whole.read_bytes()


async def test_an_imported_journal_can_be_exported_again(whole: Path, tmp_path: Path) -> None:
    importing.lay_down(whole, tmp_path / "run")
    await write(ArchiveSource(tmp_path / "run"), tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("steps", [{0}, {1}, {0, 2}])
async def test_a_step_has_what_it_needs_and_no_more(world: World, whole: Path, tmp_path: Path, steps: set[int]) -> None:
    exported = MemorySource.of(world)
    await write(exported, tmp_path / "step.zip", steps)
    importing.lay_down(tmp_path / "step.zip", tmp_path / "step")
    importing.lay_down(whole, tmp_path / "whole")
    cut, all_of_it = ArchiveSource(tmp_path / "step"), ArchiveSource(tmp_path / "whole")
    wanted = [m async for m in exported.messages(steps)]
    assert [m async for m in cut.messages()] == wanted
    assert [m async for m in cut.messages(steps)] == wanted
    assert [m async for m in all_of_it.messages(steps)] == wanted
    events = await cut.records()
    assert {r.event.step for r in events if not isinstance(r.event, ev.StepTrained | ev.WeightsPushed)} == {-1, *steps}
    named = {r.event.sample.digest for r in events if isinstance(r.event, ev.TrajectoryMerged)} - {""}
    assert named and {p.name for p in (tmp_path / "step" / "blobs").rglob("*") if p.is_file()} == named
    other = ({0, 1, 2} - steps).pop()
    with pytest.raises(JournalError, match=rf"was exported with step .* alone, not {other}"):
        await cut.records({other})


async def test_checkpoints_travel_whole(world: World, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with_checkpoints(world, root)
    await write(MemorySource.of(world), tmp_path / "step.zip", {1}, {"checkpoints/step-000000": root / "step-000000"})
    importing.lay_down(tmp_path / "step.zip", tmp_path / "run")
    from rl360.trainer import checkpoints

    assert checkpoints.verify(tmp_path / "run" / "checkpoints" / "step-000000").manifest.version == 1
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]


async def test_an_event_of_a_newer_version_travels_as_it_is(world: World, tmp_path: Path) -> None:
    blob = world.blobs.put(b"new" * 1000)
    body = msgspec.msgpack.encode({"type": "NewEvent", "run": RUN, "step": 1, "deep": [{"data": {"size": 3000, "digest": blob}}]})
    known = [message(r) for r in world.journal.records]
    new = Message(len(known) + 1, 1_000_000_000, f"rl360.{RUN}.ev.1.NewEvent._", "id", "2", "", body)
    await write(MemorySource([*known, new], world.blobs), tmp_path / "f.zip")
    importing.lay_down(tmp_path / "f.zip", tmp_path / "run")
    source = ArchiveSource(tmp_path / "run")
    assert [m async for m in source.messages()][-1] == new
    assert source.blobs.get(blob) == b"new" * 1000
    assert (await source.read()).unknown == {new.seq: "NewEvent"}


async def test_no_secret_travels(whole: Path) -> None:
    with zipfile.ZipFile(whole) as archive:
        assert {n.split("/")[0] for n in archive.namelist()} == {"recipe.json", "journal", "blobs"}


async def test_a_step_that_is_not_there_and_a_file_that_is_are_refused(world: World, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="run world has no step 9"):
        await write(MemorySource.of(world), tmp_path / "f.zip", {9})
    with pytest.raises(FileExistsError, match="choose another name"):
        await write(MemorySource.of(world), whole)
    assert list(tmp_path.iterdir()) == []


async def test_a_blob_that_is_gone_stops_an_export_unless_it_was_pruned(tmp_path: Path) -> None:
    world = play(tmp_path / "world")
    merged = next(e for e in world.journal.of(ev.TrajectoryMerged) if e.step == 0 and e.sample.digest)
    world.blobs.remove(merged.sample.digest)
    with pytest.raises(BlobMissing, match=merged.sample.digest):
        await write(MemorySource.of(world), tmp_path / "f.zip")
    assert not list(tmp_path.glob("*.zip*")) and not list(tmp_path.glob(".*"))
    world.journal.publish(ev.BlobsPruned(run=RUN, first=0, last=0, kept=(), blobs=1, blob_bytes=1, checkpoints=(), checkpoint_bytes=0))
    assert (await write(MemorySource.of(world), tmp_path / "f.zip")).pruned == 1


# ------------------------------------------------------------------------------------------------ what is not whole


def refused(data: bytes, folder: Path) -> str:
    """The error of an import, which left nothing behind."""
    folder.mkdir(exist_ok=True)
    file = folder / "file.zip"
    file.write_bytes(data)
    with pytest.raises(JournalError) as e:
        importing.lay_down(file, folder / "run")
    assert [p.name for p in folder.iterdir()] == ["file.zip"]
    assert str(file) in str(e.value)
    return str(e.value)


def rewritten(file: Path, out: Path, **changes: bytes | None) -> bytes:
    """A zip with other members: `changes` by name (slashes as __); None drops one."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = changes.pop(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
        for name, data in changes.items():
            new.writestr(name, data or b"")
    return out.read_bytes()


def test_foreign_truncated_and_missing_files_are_refused(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    assert "not a whole RL360 journal" in refused(b"", tmp_path / "a")
    assert "not a whole RL360 journal" in refused(b"hello" * 1000, tmp_path / "b")
    assert "not a whole RL360 journal" in refused(data[: len(data) // 2], tmp_path / "c")
    assert "not a whole RL360 journal" in refused(data[:-1], tmp_path / "d")
    assert f"it has no {MANIFEST}" in refused(rewritten(whole, tmp_path / "x", **{MANIFEST: None}), tmp_path / "e")
    with pytest.raises(JournalError, match="no such file"):
        importing.lay_down(tmp_path / "none.zip", tmp_path / "run")


def test_what_differs_from_the_manifest_is_named(whole: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(whole) as archive:
        blob = next(n for n in archive.namelist() if n.startswith("blobs/"))
        segment = next(n for n in archive.namelist() if "step-000001" in n)
        told = json.loads(archive.read(MANIFEST))
        changed, cut = bytearray(archive.read(blob)), archive.read(segment)[:-1]
    changed[-1] ^= 1
    cases: list[tuple[dict[str, bytes | None], str]] = [
        ({blob: bytes(changed)}, f"{blob} is damaged"),
        ({segment: cut}, f"{segment} has another size"),
        ({segment: None}, segment),
        ({"more": b"x"}, "more"),
        ({MANIFEST: b"{}"}, "is not an RL360 journal"),
        ({MANIFEST: b"{"}, "is damaged"),
        ({MANIFEST: json.dumps({**told, "format": 2}).encode()}, "has format 2, this version reads 1"),
        ({MANIFEST: json.dumps({**told, "run": "other"}).encode()}, "checksum differs"),
    ]
    for i, (changes, says) in enumerate(cases):
        assert says in refused(rewritten(whole, tmp_path / "x", **changes), tmp_path / str(i))


def test_a_name_that_leads_out_of_the_folder_is_refused(whole: Path, tmp_path: Path) -> None:
    from rl360.journal import manifest as told

    with zipfile.ZipFile(whole) as archive:
        manifest = told.read(archive.read(MANIFEST), "x")
    for name in ("../evil", "/etc/evil", "checkpoints/step-000001/../../evil", "secrets.json", "blobs/aa/" + "a" * 64):
        bad = msgspec.structs.replace(manifest, members={**manifest.members, name: manifest.members["recipe.json"]}).sealed()
        with pytest.raises(JournalError, match="does not belong"):
            told.read(msgspec.json.encode(bad), "x")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_harmless(whole: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Zip has a few bytes that say nothing (times, say). Whatever an import accepts is what was exported."""
    flipped = bytearray(whole.read_bytes())
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    folder = tmp_path_factory.mktemp("flip")
    (folder / "file.zip").write_bytes(flipped)
    try:
        manifest = importing.lay_down(folder / "file.zip", folder / "run")
    except JournalError:
        assert [p.name for p in folder.iterdir()] == ["file.zip"]
        return
    with zipfile.ZipFile(whole) as archive:
        for name in manifest.members:
            assert (folder / "run" / name).read_bytes() == archive.read(name)


def test_only_a_fresh_folder_is_taken(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    importing.lay_down(whole, tmp_path / "empty")
    for taken in (tmp_path / "empty", whole):
        with pytest.raises(FileExistsError, match="fresh folder"):
            importing.lay_down(whole, taken)


async def test_damage_after_the_import_is_named_when_it_is_read(whole: Path, tmp_path: Path) -> None:
    importing.lay_down(whole, tmp_path / "run")
    path = next((tmp_path / "run" / "journal" / "events").glob("step-000001*"))
    path.write_bytes(path.read_bytes()[:-3])
    source = ArchiveSource(tmp_path / "run")
    assert await source.records({0}), "other steps can be read"
    with pytest.raises(JournalError, match=path.name):
        await source.records()


# ------------------------------------------------------------------------------------------------ order


@given(st.lists(st.integers(-1, 3), max_size=60), st.integers(1, 40), st.integers(1, 200))
def test_segments_come_back_in_order_whatever_their_size(steps: list[int], segment: int, held: int) -> None:
    def one(seq: int, step: int) -> Message:
        return Message(seq, seq, subjects.pattern("r", step=subjects.step_token(step), type_="T", group="_"), "", "", "", b"x" * 7)

    messages = [one(i + 1, s) for i, s in enumerate(steps)]
    files: dict[str, bytes] = {}
    writer = SegmentWriter(files.__setitem__, segment_bytes=segment, held_bytes=held)
    for m in messages:
        writer.add(m)
    writer.finish()
    assert list(in_order(writer.segments, lambda s: decode(files[s.name], s))) == messages


def test_parts_of_steps_are_each_asked_for_once() -> None:
    parts = selection.parts({0, 3, 4})
    assert [(p.step, bool(p.types)) for p in parts] == [(-1, False), (0, False), (2, True), (3, False), (4, False)]
    assert selection.filters("r", selection.parts({1}))[:2] == ["rl360.r.ev._.*.*", "rl360.r.ev.0.StepTrained.*"]
