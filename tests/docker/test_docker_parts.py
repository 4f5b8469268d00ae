"""What needs no daemon: frames, a command's output, and archives that an agent made."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.agents.sandbox.base import OUTPUT_LIMIT
from rl360.agents.sandbox.docker.archive import MAX_FILE, HostileArchive, pack, unpack
from rl360.agents.sandbox.docker.command import Said
from rl360.agents.sandbox.docker.engine import Engine, NoDaemon
from rl360.agents.sandbox.docker.stream import Frames

pieces = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(min_size=1, max_size=40)), max_size=8)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    out: list[bytes] = []
    for size in sizes:
        out.append(data[:size])
        data = data[size:]
    return [*out, data]


@given(pieces, st.lists(st.integers(0, 30), max_size=12))
def test_frames_come_apart_byte_for_byte_however_they_are_cut(sent: list[tuple[int, bytes]], sizes: list[int]) -> None:
    stream = b"".join(bytes([to, 0, 0, 0]) + len(data).to_bytes(4) + data for to, data in sent)
    frames = Frames()
    got = [piece for part in cut(stream, sizes) for piece in frames.feed(part)]
    for to in (1, 2):
        assert b"".join(d for s, d in got if s == to) == b"".join(d for s, d in sent if s == to)


@given(st.binary(max_size=200), st.integers(0, 255), st.lists(st.integers(0, 40), max_size=10))
def test_a_commands_output_and_status_are_exact_however_they_are_cut(output: bytes, status: int, sizes: list[int]) -> None:
    said = Said("0123456789abcdef")
    for part in cut(b"17\n" + output + b"\x000123456789abcdef %d\n" % status, sizes):
        said.feed(part)
    assert (said.group, said.output, said.status) == (17, output, status)


def test_output_beyond_the_limit_is_counted_and_not_kept() -> None:
    said = Said("n")
    said.feed(b"1\n" + b"x" * (OUTPUT_LIMIT + 5) + b"\0n 0\n")
    assert (len(said.output), said.total) == (OUTPUT_LIMIT, OUTPUT_LIMIT + 5)


def archive(*entries: tuple[str, bytes, str]) -> io.BytesIO:
    """Entries of (name, tar type, link or content)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, text in entries:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                entry.linkname = text
            data = text.encode() if kind == tarfile.REGTYPE else b""
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    out.seek(0)
    return out


DIR, FILE, LINK, HARD = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    "entries",
    [
        [("v/../../evil", FILE, "x")],
        [("/evil", FILE, "x")],
        [("v", DIR, ""), ("v/a", LINK, "/"), ("v/a/evil", FILE, "x")],
        [("v", DIR, ""), ("v/a", LINK, "/tmp/evil"), ("v/a", FILE, "x")],
        [("v", DIR, ""), ("v/a", HARD, "v/../../etc/passwd")],
        [("v", DIR, ""), ("v/a", HARD, "v/absent")],
        [("v", DIR, ""), ("v/a", tarfile.CHRTYPE, "")],
        [("v", DIR, ""), ("v/a", tarfile.FIFOTYPE, "")],
        [("v", DIR, ""), *((f"v/{n}", FILE, "") for n in range(10_001))],
    ],
)
def test_s17_an_archive_that_would_write_elsewhere_is_refused(tmp_path: Path, entries: list[tuple[str, bytes, str]]) -> None:
    into = tmp_path / "a/b/into"
    into.mkdir(parents=True)
    with pytest.raises(HostileArchive):
        unpack(archive(*entries), into)
    assert list(tmp_path.rglob("evil")) == []


def test_links_come_out_as_links_and_large_files_cut(tmp_path: Path) -> None:
    big = "x" * (MAX_FILE + 1)
    unpack(archive(("v", DIR, ""), ("v/a", LINK, "/etc/passwd"), ("v/b", FILE, "1"), ("v/c", HARD, "v/b"), ("v/d", FILE, big)), tmp_path)
    assert os.readlink(tmp_path / "a") == "/etc/passwd"
    assert (tmp_path / "b").stat().st_nlink == 2
    assert (tmp_path / "d").stat().st_size == MAX_FILE


def test_a_folder_goes_in_and_out_again(tmp_path: Path) -> None:
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/sub/x").write_bytes(b"\0\xff")
    (tmp_path / "in/run.sh").write_text("true\n")
    (tmp_path / "in/run.sh").chmod(0o755)
    out = io.BytesIO()
    pack(tmp_path / "in", "/a/tests", out)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        assert {m.name: (m.isdir(), m.uid, bool(m.mode & 0o100)) for m in tar} == {
            "a": (True, 0, True),
            "a/tests": (True, 0, True),
            "a/tests/sub": (True, 0, True),
            "a/tests/sub/x": (False, 0, False),
            "a/tests/run.sh": (False, 0, True),
        }


def test_a_missing_daemon_says_what_to_do() -> None:
    pytest.importorskip("docker")
    with pytest.raises(NoDaemon, match="start dockerd"):
        Engine("unix:///nowhere/docker.sock")
