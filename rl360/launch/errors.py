"""Errors of input: what the command line shows as one line instead of a traceback."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rl360.agents.tasks import TaskError
from rl360.bus.blobs import BlobError
from rl360.bus.connection import BusError
from rl360.config import ConfigError
from rl360.engines.client import EngineError
from rl360.extras import MissingExtra
from rl360.journal.source import JournalError
from rl360.launch.lead import RunFailed
from rl360.trainer.checkpoints import CheckpointError
from rl360.trainer.spec import ModelError


def input_errors() -> tuple[type[Exception], ...]:
    return (
        ConfigError,
        EngineError,
        MissingExtra,
        BusError,
        JournalError,
        BlobError,
        TaskError,
        CheckpointError,
        ModelError,
        OSError,  # names the file itself: unreadable, a folder, a full disk; `told` adds the remedy
        RunFailed,
    )


_REMEDIES: Final = {
    errno.ENOENT: "check the path: that file, or the folder it is to lie in, is not there",
    errno.EEXIST: "name another place: something is there already",
    errno.ENOTDIR: "name another place: a file stands where a folder is needed",
    errno.EISDIR: "name a file: this is a folder",
    errno.ENOTEMPTY: "name another place, or empty this one",
    errno.EACCES: "name a place that you may use, or change its permissions",
    errno.EPERM: "name a place that you may use, or change its permissions",
    errno.EROFS: "name another place: this one is mounted read-only",
    errno.ENOSPC: "free some space, or name a place on another disk",
    errno.EDQUOT: "free some of your quota, or name a place on another disk",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "name another place: this one is a circle of links",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
}


def told(error: Exception) -> str:
    """One line of an error of input: the place and the remedy."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    remedy = _REMEDIES.get(error.errno or 0, "name another place, or put this one right")
    return f"{error.filename}: {error.strerror}; {remedy}"


@contextmanager
def writing(place: Path) -> Generator[None]:
    """What can't be written beside `place`, under a name for the time being, is told as `place`, which the user named."""
    try:
        yield
    except OSError as e:
        if e.filename is not None and (path := Path(e.filename)) != place and place.parent in path.parents and place not in path.parents:
            raise type(e)(e.errno, e.strerror, str(place)) from e
        raise
