"""A run that can't record any more stops with one error that names the place and the remedy. It does not spin, and loses nothing.

Seen in three ways: the supervisor watches the free space of the run's disks and nats-server's own health; a worker whose event
or file is refused for want of space ends at once, with a status that tells the supervisor not to start it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from rl360.agents.tasks import MAX_BYTES
from rl360.bus.blobs import is_full
from rl360.bus.connection import BusError

EXIT_FULL: Final = 28
"""Exit status of a worker that found a journal or a disk full (the number of ENOSPC)."""
_PERIOD: Final = 1.0  # seconds between two looks
_TIMEOUT: Final = 2.0
_NO_SPACE: Final = "no space left on device"
_TASK_MB: Final = MAX_BYTES >> 20


def free_mb(path: Path) -> int:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize >> 20


def shortage(folder: Path, least_mb: int) -> str:
    """The first of a run's places with too little space left; empty: there is enough.

    Where runners copy tasks to, a whole task must fit whatever the recipe says: else every attempt of every step would fail.
    """
    if (sandboxes := folder / "sandboxes").exists() and (left := free_mb(sandboxes)) < _TASK_MB:
        return f"{left} MiB are left on the disk of {sandboxes}, less than the {_TASK_MB} MiB that a task may take"
    for place in (folder, *(folder / name for name in ("nats", "blobs", "checkpoints"))):
        if place.exists() and (left := free_mb(place)) < least_mb:
            return f"{left} MiB are left on the disk of {place}, less than supervise.min_free_mb = {least_mb}"
    return ""


def remedy(folder: Path) -> str:
    return f"free some space, then go on with: rl360 run --resume {folder}"


def journal_full(error: BusError, folder: Path) -> str:
    return f"the journal is full: {error}: {folder / 'nats'}; {remedy(folder)}"


async def watch(folder: Path, least_mb: int, monitor_port: int) -> str:
    """Wait until something is used up; returns what and where."""
    while True:
        await asyncio.sleep(_PERIOD)
        why = shortage(folder, least_mb) or await asyncio.to_thread(_server_trouble, monitor_port)
        if why:
            return why


def _server_trouble(monitor_port: int) -> str:
    """nats-server keeps running when it can't write, and says so only here."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{monitor_port}/healthz", timeout=_TIMEOUT):
            return ""
    except urllib.error.HTTPError as e:
        return full_of(e.read())
    except (urllib.error.URLError, OSError):
        return ""  # it is down: its watcher starts it again


def full_of(body: bytes) -> str:
    """The error in an answer of /healthz when it is about space; empty: it is about something else."""
    try:
        answer: Any = json.loads(body)
    except ValueError:
        return ""
    error = str(answer.get("error", "")) if isinstance(answer, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return f"nats-server can't write the journal: {error}" if _NO_SPACE in error.lower() else ""


# ------------------------------------------------------------------------------------------------ in a worker


def out_of_space(error: BaseException) -> str:
    """What an error, or one that it came from, says about a full disk; empty: nothing."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and is_full(seen):
            return f"the disk is full: {seen.filename or seen}"
        if _NO_SPACE in str(seen).lower():
            return f"the disk is full: {str(seen).splitlines()[0][:300]}"
        seen = seen.__cause__ or seen.__context__
    return ""


def stop_full(why: str) -> NoReturn:
    """End this process now: whatever it did on would be lost. What is outstanding is done again when the run goes on."""
    print(f"rl360: {why}", file=sys.stderr, flush=True)
    os._exit(EXIT_FULL)


def last_word(lines: Sequence[str]) -> str:
    """What a worker that ended with `EXIT_FULL` said last."""
    said = [line.removeprefix("rl360: ") for line in lines if line.startswith("rl360: ")]
    return said[-1] if said else "the journal or a disk is full"
