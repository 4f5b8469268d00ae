"""Checkpoints in megatron's distributed format, each complete or absent.

    checkpoints/step-000012/            after the optimizer step of step 12
        manifest.json                   written last: step, version, the step's StepTrained event, the journal's newest event that
                                        it was made from, size and digest of every file
        weights/                        megatron dist_checkpointing (torch_dist): model and optimizer
        hf/                             config.json and tokenizer files, for export

A checkpoint is written aside and renamed, so a crash leaves the folder `….tmp` that nobody reads. `latest` reads every byte it
trusts; a damaged checkpoint is passed over for the one before, and said so. The event inside makes the step exactly-once: what a
crash kept from the journal is published from here.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import blake3
import msgspec

from rl360.errors import InputError

FORMAT: Final = 1
_NAME: Final = "step-{:06d}"
MANIFEST: Final = "manifest.json"
FOLDER: Final = "checkpoints"
"""Of a run's folder."""
_WEIGHT_FILES: Final = (".safetensors", ".safetensors.index.json", ".bin")


class CheckpointError(InputError):
    """A checkpoint that can't be used: the message names the path and what is wrong with it."""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    blake3: str


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event of the journal: its sequence and when it was recorded (unix seconds). A journal without it is not the checkpoint's."""

    seq: int
    time: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`event` is the encoded StepTrained of this step; `seen` the newest event that the step was made from."""

    format: int
    step: int
    version: int
    event: bytes
    files: dict[str, FileRecord]
    seen: Seen | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, verified."""

    path: Path
    manifest: Manifest

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def hf(self) -> Path:
        return self.path / "hf"


@dataclass(frozen=True)
class Latest:
    """The newest usable checkpoint (None: there is none) and, for each newer one that was passed over, what is wrong with it."""

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...]


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step`."""
    return _NAME.format(step)


def aside(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return root / f"{name_of(step)}.tmp"


def commit(root: Path, *, step: int, version: int, event: bytes, hf_source: Path, seen: Seen | None = None) -> Checkpoint:
    """Complete the checkpoint that stands aside: manifest last, everything on disk, then the rename."""
    written = aside(root, step)
    copy_hf_files(hf_source, written / "hf")
    files = {str(p.relative_to(written)): _record(p) for p in sorted(written.rglob("*")) if p.is_file()}
    manifest = Manifest(format=FORMAT, step=step, version=version, event=event, files=files, seen=seen)
    for name in files:
        _sync(written / name)
    (written / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    _sync(written / MANIFEST)
    final = root / name_of(step)
    if final.exists():  # one that `latest` refused, or the process would not be making this step again
        set_aside(final, "damaged")
    os.replace(written, final)
    _sync(final.parent)
    return Checkpoint(final, manifest)


def copy_hf_files(source: Path, target: Path) -> None:
    """Copy all but the weights of a policy folder."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, target / path.name)


def set_aside(final: Path, why: str) -> Path:
    """Rename a checkpoint, so that nothing takes it for one; returns its new path."""
    n = 1
    while (name := final.with_name(f"{final.name}.{why}-{n}")).exists():
        n += 1
    os.replace(final, name)
    return name


def _record(path: Path) -> FileRecord:
    hasher = blake3.blake3()
    hasher.update_mmap(path)
    return FileRecord(path.stat().st_size, hasher.hexdigest())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------------ read


def latest(root: Path) -> Latest:
    """The newest checkpoint whose every byte is as it was written, and why newer ones were passed over."""
    passed_over: list[str] = []
    for path in sorted(root.glob("step-??????"), reverse=True):
        try:
            return Latest(verify(path), tuple(passed_over))
        except CheckpointError as e:
            passed_over.append(str(e))
    return Latest(None, tuple(passed_over))


def seen(root: Path) -> dict[Path, Seen]:
    """What each checkpoint says it was made from. Those that don't say, or can't be read, are left out: `latest` judges them."""
    found: dict[Path, Seen] = {}
    for path in sorted(root.glob("step-??????")):
        try:
            known = _manifest(path).seen
        except CheckpointError:
            continue
        if known is not None:
            found[path] = known
    return found


def of_version(root: Path, version: int) -> Checkpoint | None:
    """The checkpoint that made `version`. Raises CheckpointError when it is there but damaged."""
    for path in sorted(root.glob("step-??????"), reverse=True):
        if _manifest(path).version == version:
            return verify(path)
    return None


def versions(root: Path) -> dict[str, int]:
    """Folder names of complete checkpoints and the version that each holds. One whose manifest can't be read is left out."""
    found: dict[str, int] = {}
    for path in sorted(root.glob("step-??????")):
        try:
            found[path.name] = _manifest(path).version
        except CheckpointError:
            continue
    return found


def remove(path: Path) -> None:
    """Remove a checkpoint. A reader finds it whole or not at all."""
    gone = path.with_name(f".{path.name}.gone")
    os.replace(path, gone)
    shutil.rmtree(gone)


def verify(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and check every file against it. Raises CheckpointError."""
    manifest = _manifest(path)
    for name, record in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing: restore it, or remove the folder")
        if file.stat().st_size != record.size or _record(file) != record:
            raise CheckpointError(f"checkpoint {path}: {name} is not what was written: restore it, or remove the folder")
    return Checkpoint(path, manifest)


def _manifest(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except OSError as e:
        raise CheckpointError(f"checkpoint {path}: no {MANIFEST} ({e.strerror}): it was never completed; remove the folder") from None
    except msgspec.MsgspecError as e:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged ({e}): restore it, or remove the folder") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"checkpoint {path}: format {manifest.format} is not {FORMAT}: use the RL360 version that wrote it")
    return manifest
