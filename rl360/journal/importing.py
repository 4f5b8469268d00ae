"""An archive checked to its last byte and laid down as a folder that is read like that of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from rl360.journal import manifest as told
from rl360.journal.archive import read_segment
from rl360.journal.manifest import MANIFEST, Manifest, Member, copy
from rl360.journal.segments import in_order
from rl360.journal.source import JournalError

_MANIFEST_BYTES: Final = 1 << 30


def lay_down(file: Path, folder: Path) -> Manifest:
    """Check every byte of an archive and unpack it to a fresh folder, whole or not at all.

    Raises JournalError naming what is wrong with the file, FileExistsError when there is something at `folder`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} holds something already: import into a fresh folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with _opened(file) as archive:
            manifest = _unpack(archive, aside, str(file))
        (aside / "blobs").mkdir(exist_ok=True)
        for _ in in_order(manifest.segments, lambda s: read_segment(aside, s, manifest, str(file))):
            pass
        aside.chmod(0o777 & ~_umask())
        os.replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside)
        raise
    return manifest


@contextmanager
def _opened(file: Path) -> Generator[zipfile.ZipFile]:
    """What zipfile says of a file that is no archive, or a damaged one, as one error that names it."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except FileNotFoundError:
        raise JournalError(f"{file}: there is no such file") from None
    except OSError as e:
        raise JournalError(f"{file} can't be imported: {e}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as e:
        raise JournalError(f"{file} is not a whole RL360 journal: {str(e) or type(e).__name__}; get the file again") from None


def _unpack(archive: zipfile.ZipFile, folder: Path, where: str) -> Manifest:
    names = archive.namelist()
    if MANIFEST not in names:
        raise JournalError(f"{where} is not an RL360 journal: it has no {MANIFEST}")
    manifest = told.read(_read(archive, MANIFEST), where)
    if sorted(names) != sorted({*manifest.members, MANIFEST}):
        odd = ", ".join(sorted(set(names) ^ {*manifest.members, MANIFEST})[:3]) or "a name twice"
        raise JournalError(f"{where}: what it holds is not what its {MANIFEST} lists ({odd}); get the file again")
    for name, member in manifest.members.items():
        _extract(archive, name, folder / name, member, where)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _MANIFEST_BYTES:
        raise JournalError(f"{archive.filename}: {name} is too large to be one")
    return archive.read(name)


def _extract(archive: zipfile.ZipFile, name: str, path: Path, member: Member, where: str) -> None:
    if archive.getinfo(name).file_size != member.size:
        raise JournalError(f"{where}: {name} has another size than {MANIFEST} says; get the file again")
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(name) as source, path.open("wb") as target:
        told.check(name, copy(source, target), member, where)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
