"""What is kept of a dead agent's workdir: copied file by file, nothing followed, nothing but plain files, bounded.

The agent chose every name, link, mode and size in there. It is dead, so nothing changes while it is looked at; a link on the
way to a file, a device, a pipe, what can't be read and what goes beyond the bounds is left out and noted: none of it is a failure.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from rl360.agents.support import below
from rl360.agents.tasks import Task

MAX_BYTES: Final = 64 << 20
MAX_ENTRIES: Final = 10_000
MAX_DEPTH: Final = 64
MAX_PATH: Final = 1024
"""Bytes of a path inside: whatever folder of ours comes before it, the kernel takes the whole."""
MANIFEST: Final = "manifest.json"
_CHUNK: Final = 1 << 20


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the manifest: `bytes` kept, or `refused` with the reason. `path` is relative to the artifacts' folder."""

    path: str
    bytes: int = 0
    refused: str = ""


@dataclass
class Copying:
    """What a copy may still take, and what it noted."""

    entries: int = MAX_ENTRIES
    bytes: int = MAX_BYTES
    links: bool = False  # symbolic links are made again as they stand; else they are refused
    noted: list[Entry] = field(default_factory=list[Entry])

    def note(self, path: PurePosixPath, size: int = 0, refused: str = "") -> None:
        text = os.fsencode(path).decode(errors="backslashreplace")  # a name may be any bytes
        self.noted.append(Entry(path=text, bytes=size, refused=refused))


def collect(workdir: Path, task: Task, into: Path) -> tuple[Entry, ...]:
    """Keep a task's artifacts in the new folder `into`, with a manifest. `workdir` is the agent's, as the host sees it."""
    copying = Copying()
    for artifact in task.artifacts:
        inside = below(artifact.source, task.workdir)
        assert inside is not None, "refused by support.py"
        to = PurePosixPath(artifact.destination or PurePosixPath(task.workdir) / inside)
        copy(workdir, inside, into, PurePosixPath(str(to).lstrip("/")), copying, artifact.exclude)
    into.mkdir(parents=True, exist_ok=True)
    (into / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(copying.noted)))
    return tuple(copying.noted)


def hand_over(workdir: Path, task: Task, into: Path) -> tuple[Entry, ...]:
    """Lay a task's artifacts where they lay, in the workdir `into` of a verifier's own place; whoever runs there may change them."""
    copying = Copying()
    for artifact in task.artifacts:
        inside = below(artifact.source, task.workdir)
        assert inside is not None, "refused by support.py"
        target = into / inside
        if not target.is_symlink() and target.is_file():
            target.unlink()  # the task brought one itself
        copy(workdir, inside, into, inside, copying, artifact.exclude)
        _open_up(target, into)
    return tuple(copying.noted)


def copy(root: Path, inside: PurePosixPath, into: Path, to: PurePosixPath, copying: Copying, exclude: Sequence[str] = ()) -> None:
    """Copy `inside` of `root` to `to` of `into`. Nothing outside of `root` is read, nothing outside of `into` written."""
    source = root
    for part in inside.parts[:-1]:
        source = source / part
        if not _is_folder(source):
            return copying.note(to, refused="a part of its path is missing or no folder")
    source = root / inside
    if not os.path.lexists(source):
        return copying.note(to, refused="missing")
    try:
        (into / to).parent.mkdir(parents=True, exist_ok=True)
        _copy(source, into / to, to, copying, exclude, 0)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        copying.note(to, refused="another artifact lies in its way")


def _copy(source: Path, target: Path, name: PurePosixPath, copying: Copying, exclude: Sequence[str], depth: int) -> None:
    copying.entries -= 1
    if copying.entries < 0 or depth > MAX_DEPTH:
        if copying.entries >= -1:
            copying.note(name, refused=f"beyond {MAX_ENTRIES} entries or {MAX_DEPTH} folders deep; so is what follows")
        return
    if len(os.fsencode(name)) > MAX_PATH:
        return copying.note(name, refused=f"a path of more than {MAX_PATH} bytes")
    try:
        mode = source.lstat().st_mode
        entries = sorted(os.listdir(source)) if stat.S_ISDIR(mode) else []
    except OSError as e:
        return copying.note(name, refused=f"can't be read: {e.strerror}")
    if stat.S_ISDIR(mode):
        target.mkdir(exist_ok=True)
        for entry in entries:
            if not any(fnmatch.fnmatchcase(entry, pattern) for pattern in exclude):
                _copy(source / entry, target / entry, name / entry, copying, exclude, depth + 1)
    elif stat.S_ISREG(mode):
        _copy_file(source, target, name, copying)
    elif stat.S_ISLNK(mode) and copying.links and not target.exists():
        os.symlink(os.readlink(source), target)
    else:
        copying.note(name, refused="a link" if stat.S_ISLNK(mode) else "a device, a pipe or a socket")


def _copy_file(source: Path, target: Path, name: PurePosixPath, copying: Copying) -> None:
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        return copying.note(name, refused=f"can't be read: {e.strerror}")
    with os.fdopen(fd, "rb") as reading:
        info = os.fstat(fd)
        if info.st_size > copying.bytes:  # a hole counts as what it pretends to hold
            return copying.note(name, refused=f"{info.st_size} bytes, of which {copying.bytes} may still be kept")
        copying.bytes -= info.st_size
        with target.open("wb") as writing:
            while piece := reading.read(_CHUNK):
                writing.write(piece)
        target.chmod(stat.S_IMODE(info.st_mode) & 0o777 | 0o600)
    return copying.note(name, info.st_size)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _open_up(path: Path, root: Path) -> None:
    """Let any user of the place read and change it, and come to it."""
    if not path.exists():
        return  # it was refused
    for parent in path.parents:
        if parent == root:
            break
        parent.chmod(0o777)
    for each in (path, *path.rglob("*")) if path.is_dir() else (path,):
        if not each.is_symlink():
            each.chmod(0o777 if each.is_dir() else each.stat().st_mode & 0o111 | 0o666)
