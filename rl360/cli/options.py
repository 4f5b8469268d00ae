"""What options take: each refuses a wrong value by name, with the valid ones, before anything is read."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import socket
from pathlib import Path
from typing import Protocol


class Commands(Protocol):
    """Where a group adds its commands."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser: ...


def overrides(parser: argparse.ArgumentParser, help: str = "override one value") -> None:
    """`--set KEY=VALUE`, as often as one likes."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=help)


def count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def rate(text: str) -> float:
    number = _finite(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate: give a number above 0")
    return number


def duration(text: str) -> float:
    number = _finite(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: give seconds, from 0 on")
    return number


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return number


def picture(text: str) -> Path:
    if Path(text).suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .svg or .png")
    return Path(text)


def host(text: str) -> str:
    """A host's name; "hostname": this machine's own."""
    name = socket.gethostname() if text == "hostname" else text
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._{}-]*[A-Za-z0-9}])?", name):
        raise argparse.ArgumentTypeError(f"{text!r} is no host's name: letters, digits, dots and dashes")
    return name


def journal_name(text: str) -> str:
    from rl360.bus.subjects import check_run_name

    try:
        return check_run_name(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def event_type(text: str) -> str:
    from rl360.bus.events import EVENT_TYPES

    if text not in EVENT_TYPES:
        near = difflib.get_close_matches(text, EVENT_TYPES, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentTypeError(f"no event is called {text!r}{hint} (known: {', '.join(sorted(EVENT_TYPES))})")
    return text
