"""The command line: `rl360 run`, `rl360 worker`, `rl360 doctor`, and what reads a finished run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from rl360 import __version__
from rl360.cli import cluster, journal, making, reading, running, simulating, tasks
from rl360.errors import InputError, told

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the `rl360` command; returns the exit status. Errors of input are one line on stderr, status 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "command"):
        parser.print_help()
        return 2
    command: Command = args.command
    try:
        return command(args)
    except BrokenPipeError:  # whoever read our output (`| head`) has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (InputError, OSError) as e:  # an OSError names the file itself: unreadable, a folder, a full disk
        print(f"rl360: {told(e)}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="rl360", description=__doc__)
    parser.add_argument("--version", action="version", version=f"rl360 {__version__}")
    sub = parser.add_subparsers(title="commands", metavar="COMMAND")
    for group in (running, cluster, simulating, reading, journal, making, tasks):
        group.add(sub)
    return parser
