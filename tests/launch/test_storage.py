"""A full journal or disk stops the run with one error that names place and remedy; nothing is lost, nothing spins."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus
from rl360.bus.connection import JetStreamError, api
from rl360.launch import storage
from rl360.launch.rundir import RunDir
from rl360.launch.stored import served
from tests.launch.run_process import SMALL, leftovers, running
from tests.launch.test_resume import when
from tests.launch.test_run import RECIPE, whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


async def limit(bus: Bus, max_bytes: int) -> None:
    """Give the journal a limit of its own (-1: none)."""
    name = subjects.stream(bus.run)
    config = (await api(bus.client, f"STREAM.INFO.{name}"))["config"]
    await api(bus.client, f"STREAM.UPDATE.{name}", {**config, "max_bytes": max_bytes})


def joined(run: str, number: int, size: int) -> ev.EngineLost:
    return ev.EngineLost(run=run, generation=f"g{number}", cause="x" * size)


# ------------------------------------------------------------------------------------------------ who notices


async def test_a_full_stream_is_told_to_who_asked_and_a_large_message_is_not(nats, tmp_path: Path) -> None:
    told: list[str] = []
    connecting = Bus.connect(nats.address(), "full", BlobStore(tmp_path / "blobs"))
    connecting.on_full = lambda e: told.append(str(e))
    async with connecting as bus:
        await bus.create_streams()
        await limit(bus, 20_000)
        receipts = [await bus.submit(joined(bus.run, number, 1000)) for number in range(15)]
        await asyncio.gather(*receipts, return_exceptions=True)
        with pytest.raises(JetStreamError) as full:
            await bus.publish(joined(bus.run, 100, 1000))
        assert full.value.full and told and "exceeded" in told[-1]
        held = await bus.last_seq()
        await limit(bus, -1)
        assert await bus.publish(joined(bus.run, 1000, 1000)) == held + 1


@pytest.mark.parametrize(
    ("description", "full"),
    [
        ("maximum bytes exceeded", True),
        ("maximum messages exceeded", True),
        ("resource limits exceeded for account", True),
        ("insufficient storage resources available", True),
        ("message size exceeds maximum allowed", False),
        ("wrong last sequence: 7", False),
    ],
)
def test_what_the_server_calls_full(description: str, full: bool) -> None:
    assert JetStreamError(503, 10077, description).full is full


def test_a_blob_that_finds_its_disk_full_says_so_and_leaves_nothing(small_disk: Path) -> None:
    store, told = BlobStore(small_disk / "blobs"), list[OSError]()
    store.on_full = told.append
    kept = store.put(os.urandom(1 << 20))
    with pytest.raises(OSError, match="No space left"):
        store.put(os.urandom(4 << 20))
    assert [e.errno for e in told] == [errno.ENOSPC]
    assert len(store.get(kept)) == 1 << 20 and list(store.root.rglob("*.tmp")) == []


def test_too_little_space_is_named_with_its_place_and_key(small_disk: Path) -> None:
    (small_disk / "blobs").mkdir()
    assert storage.shortage(small_disk, 1) == ""
    (small_disk / "filler").write_bytes(bytes(3 << 20))
    assert f"on the disk of {small_disk}, less than supervise.min_free_mb = 2" in storage.shortage(small_disk, 2)


def test_a_disk_that_holds_no_task_stops_the_run_whatever_the_recipe_says(tmp_path: Path, small_disk: Path) -> None:
    """Else every attempt of every step would be a failure of the infrastructure."""
    run = tmp_path / "run"
    run.mkdir()
    assert storage.shortage(run, 0) == ""
    (run / "sandboxes").symlink_to(small_disk)
    assert f"on the disk of {run / 'sandboxes'}, less than the 256 MiB that a task may take" in storage.shortage(run, 0)


def test_only_a_lack_of_space_makes_an_ill_server_a_full_one() -> None:
    said = b'{"status":"unavailable","error":"JetStream stream write error: write /d/2.blk: no space left on device"}'
    assert "nats-server can't write the journal" in storage.full_of(said)
    assert storage.full_of(b'{"status":"unavailable","error":"JetStream is not current"}') == ""
    assert storage.full_of(b"not json") == ""


def test_an_error_that_came_from_a_full_disk_is_recognised_and_no_other() -> None:
    wrapped = RuntimeError("the checkpoint could not be written")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/d/weights")
    assert storage.out_of_space(wrapped) == "the disk is full: /d/weights"
    assert storage.out_of_space(RuntimeError("pytorch writer: No space left on device")).startswith("the disk is full")
    assert storage.out_of_space(OSError(errno.EIO, "Input/output error")) == ""


def test_a_worker_that_can_record_nothing_ends_with_a_status_of_its_own() -> None:
    code = (
        "from pathlib import Path; from rl360.launch import storage; storage.stop_full('the journal is full: ' + storage.remedy(Path('r')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == storage.EXIT_FULL
    assert (
        storage.last_word(["noise", *done.stderr.splitlines()])
        == "the journal is full: free some space, then go on with: rl360 run --resume r"
    )


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_full_journal_stops_the_run_once_and_clearly_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with running(path, RECIPE, "--dir", str(path), overrides=(*SMALL, "run.steps=2")) as run:
        await when(run, ev.VerifierResult, 0)
        async with run.bus() as bus:
            name = subjects.stream(bus.run)
            used = (await api(bus.client, f"STREAM.INFO.{name}"))["state"]["bytes"]
            await limit(bus, used + 20_000)
        assert await run.ended(60) == 2
    text = run.output.decode()
    assert text.count("the journal is full: maximum bytes exceeded") == 1 and f"{path / 'nats'}; free some space" in text
    assert "Traceback" not in text and "restart" not in text
    assert leftovers(path) == []
    async with running(path, "--resume", str(path), overrides=()) as still:
        assert await still.ended(60) == 2
    assert "the journal is full" in still.output.decode() and "Traceback" not in still.output.decode()
    async with served(RunDir(path)) as address, Bus.connect(address, "tiny", BlobStore(path / "blobs")) as bus:
        await limit(bus, -1)
    async with running(path, "--resume", str(path), overrides=()) as resumed:
        assert await resumed.ended(120) == 0, resumed.output.decode()
    await whole(path, 2)


async def filled(path: Path, disk: Path, least: int) -> str:
    """What a run says whose journal's disk is filled up to `least` MiB in its first step."""
    path.mkdir()
    (path / "nats").symlink_to(disk)
    overrides = (*SMALL, "run.steps=2", f"supervise.min_free_mb={least}")
    async with running(path, RECIPE, "--dir", str(path), overrides=overrides) as run:
        await when(run, ev.VerifierResult, 0)
        left = storage.free_mb(disk)
        try:
            with open(disk / "filler", "wb") as f:
                for _ in range(64 * (left - least) + 64):
                    f.write(bytes(16 << 10))
                    f.flush()
        except OSError:
            assert least == 0
        assert await run.ended(90) == 2
    text = run.output.decode()
    assert text.count("rl360 run --resume") == 1 and "Traceback" not in text
    assert leftovers(path) == []
    return text


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_run_stops_before_its_disk_is_full(tmp_path: Path, small_disk: Path) -> None:
    assert "less than supervise.min_free_mb = 1" in await filled(tmp_path / "run", small_disk, least=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_disk_that_fills_up_stops_the_run_and_more_space_lets_it_go_on(tmp_path: Path, small_disk: Path) -> None:
    path = tmp_path / "run"
    assert "no space left on device" in (await filled(path, small_disk, least=0)).lower()
    (small_disk / "filler").unlink(missing_ok=True)  # the run may have been faster
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,size=64m", small_disk], check=True)
    async with running(path, "--resume", str(path), overrides=()) as resumed:
        assert await resumed.ended(150) == 0, resumed.output.decode()
    await whole(path, 2)
