"""Steps that retention leaves alone: `pins.json` in the run's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from rl360.journal.source import JournalError

_NAME: Final = "pins.json"


class _Pins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: tuple[int, ...]


def pinned(folder: Path) -> set[int]:
    """Raises JournalError when the file can't be read."""
    path = folder / _NAME
    try:
        return set(msgspec.json.decode(path.read_bytes(), type=_Pins).steps)
    except FileNotFoundError:
        return set()
    except msgspec.MsgspecError as e:
        raise JournalError(f"{path} is damaged: {e}; remove it and pin again") from None


def pin(folder: Path, step: int, *, on: bool) -> None:
    """Pin a step, or take the pin out."""
    steps = pinned(folder) | {step} if on else pinned(folder) - {step}
    aside = folder / f".{_NAME}.{os.getpid()}"
    aside.write_bytes(msgspec.json.encode(_Pins(tuple(sorted(steps)))))
    os.replace(aside, folder / _NAME)
