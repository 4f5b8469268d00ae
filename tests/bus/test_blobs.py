"""Blobs are content-addressed: damage is found, equal bytes are stored once, a full disk leaves nothing half-written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.bus.blobs import BlobError, BlobStore, digest_of
from rl360.bus.payload import INLINE_LIMIT


@given(st.binary(max_size=300))
def test_what_is_put_is_got(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    store = BlobStore(tmp_path_factory.mktemp("b"))
    assert store.get(store.put(data)) == data
    assert store.unpack(store.pack(data)) == data


def test_large_payload_travels_by_digest(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    data = bytes(INLINE_LIMIT + 1)
    packed = store.pack(data)
    assert packed.inline is None
    assert packed.digest == digest_of(data)
    assert store.unpack(packed) == data


def test_damaged_blob_is_named(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = store.put(b"x" * 100)
    store.path(digest).write_bytes(b"y" * 100)
    with pytest.raises(BlobError, match=digest):
        store.get(digest)


def test_missing_blob_is_named(tmp_path: Path) -> None:
    with pytest.raises(BlobError, match="missing"):
        BlobStore(tmp_path).get("0" * 64)


def test_full_disk_leaves_no_half_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        store.put(b"data")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
