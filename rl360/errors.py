"""Errors of input: what the command line shows as one line instead of a traceback.

Here is the kind alone, not a list: a command that meets no error need not import the parts that raise them.
"""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final


class InputError(Exception):
    """Something that the user gave can't be used: its text names the place and the remedy. The command line shows that text alone."""


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
