"""Folders to tar and back. What comes back was made by code of an agent: nothing of it may land outside its folder.

Not covered: owners, modes beyond the run bit, and extended attributes, which no reader here needs.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Final

MAX_BYTES: Final = 256 << 20
"""Of an archive that comes out."""
MAX_FILE: Final = 1 << 20
"""Of one of its files; what is beyond is left out."""
MAX_ENTRIES: Final = 10_000


class HostileArchive(ValueError):
    """An archive that would write where it must not, or too much; the message names the entry."""


def pack(folder: Path, inside: str, out: IO[bytes]) -> None:
    """Write `folder` as a tar whose entries lie below the absolute path `inside`, all owned by root. Links stay links."""

    def own(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for parent in reversed(PurePosixPath(inside).relative_to("/").parents[:-1]):
            entry = tarfile.TarInfo(str(parent))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.add(folder, str(PurePosixPath(inside).relative_to("/")), filter=own)


def unpack(stream: IO[bytes], into: Path) -> None:
    """Write the entries of a tar, its first folder taken off, below the empty folder `into`. Raises HostileArchive.

    A symbolic link is made as it stands and never followed; a second name of a file becomes a second name again, so who
    reads the folder sees both for what they are. Absolute paths, "..", devices, pipes and what lies behind a link are refused.
    """
    folders = {PurePosixPath()}
    files: set[PurePosixPath] = set()
    total = 0
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for count, entry in enumerate(tar):
            name = _below(entry.name)
            total += entry.size
            if count >= MAX_ENTRIES or total > MAX_BYTES:
                raise HostileArchive(f"more than {MAX_ENTRIES} entries or {MAX_BYTES >> 20} MiB")
            if name == PurePosixPath():
                continue
            if name.parent not in folders or name in folders or name in files:
                raise HostileArchive(f"{entry.name!r} lies in no folder of the archive, or comes twice")
            _write(tar, entry, into, name, files)
            (folders if entry.isdir() else files).add(name)


def _below(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise HostileArchive(f"{name!r} leads out of the archive")
    return PurePosixPath(*path.parts[1:])


def _write(tar: tarfile.TarFile, entry: tarfile.TarInfo, into: Path, name: PurePosixPath, files: Iterable[PurePosixPath]) -> None:
    path = into / name
    if entry.isdir():
        path.mkdir()
    elif entry.issym():
        os.symlink(entry.linkname, path)
    elif entry.islnk():
        target = _below(entry.linkname)
        if target not in files:
            raise HostileArchive(f"{entry.name!r} is another name of {entry.linkname!r}, which is not in the archive")
        os.link(into / target, path, follow_symlinks=False)
    elif entry.isreg():
        content = tar.extractfile(entry)
        assert content is not None
        path.write_bytes(content.read(MAX_FILE))
    else:
        raise HostileArchive(f"{entry.name!r} is a device or a pipe")
