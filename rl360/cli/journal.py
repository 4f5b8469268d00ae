"""`rl360 journal`: look into a run's journal, carry it in one file, keep it within bounds."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl360.cli.options import Commands, count, event_type


def add(commands: Commands) -> None:
    journal = commands.add_parser("journal", help="look into a run's journal, carry it in one file, keep it within bounds")
    sub = journal.add_subparsers(title="journal commands", metavar="COMMAND", required=True)

    ls = sub.add_parser("ls", help="what each step has: events by type, sequences, time, bytes")
    ls.add_argument("dir", type=Path)
    ls.set_defaults(command=_ls)

    tail = sub.add_parser("tail", help="the last events, one a line")
    tail.add_argument("dir", type=Path)
    tail.add_argument("--lines", type=count, default=20, metavar="N")
    tail.add_argument("--follow", action="store_true", help="go on with what a running run publishes")
    tail.add_argument("--type", action="append", type=event_type, default=[], metavar="T", dest="types")
    tail.add_argument("--step", type=int)
    tail.add_argument("--attempt", default="", metavar="A")
    tail.add_argument("--json", action="store_true")
    tail.set_defaults(command=_tail)

    export = sub.add_parser("export", help="write events and the blobs they need into one file")
    export.add_argument("dir", type=Path)
    export.add_argument("file", type=Path)
    export.add_argument("--step", action="append", type=int, default=[], metavar="N", dest="steps", help="only what this step needs")
    export.add_argument("--with-checkpoint", action="store_true", help="the weights that the steps started from as well")
    export.set_defaults(command=_export)

    import_ = sub.add_parser("import", help="lay an exported file down as a folder to read")
    import_.add_argument("file", type=Path)
    import_.add_argument("dir", type=Path)
    import_.set_defaults(command=_import)

    prune = sub.add_parser("prune", help="remove blobs and checkpoints that only old steps need; events stay")
    prune.add_argument("dir", type=Path)
    prune.add_argument("--keep-steps", type=int, required=True, metavar="N")
    prune.set_defaults(command=_prune)

    for name, text in (("pin", "keep a step from being pruned"), ("unpin", "let a step be pruned again")):
        pin = sub.add_parser(name, help=text)
        pin.add_argument("dir", type=Path)
        pin.add_argument("--step", type=int, required=True)
        pin.set_defaults(command=_pin, on=name == "pin")


def _ls(args: argparse.Namespace) -> int:
    from rl360.launch.journal_commands import ls

    return ls(args.dir)


def _tail(args: argparse.Namespace) -> int:
    from rl360.journal.lines import Filter
    from rl360.launch.journal_commands import tail

    chosen = Filter(tuple(args.types), args.step, args.attempt)
    return tail(args.dir, chosen, last=args.lines, follow=args.follow, as_json=args.json)


def _export(args: argparse.Namespace) -> int:
    from rl360.errors import writing
    from rl360.launch.journal_commands import export

    with writing(args.file):
        return export(args.dir, args.file, tuple(args.steps), with_checkpoint=args.with_checkpoint)


def _import(args: argparse.Namespace) -> int:
    from rl360.errors import writing
    from rl360.launch.journal_commands import import_

    with writing(args.dir):
        return import_(args.file, args.dir)


def _prune(args: argparse.Namespace) -> int:
    from rl360.launch.keeping import prune

    return prune(args.dir, args.keep_steps)


def _pin(args: argparse.Namespace) -> int:
    from rl360.launch.keeping import pin

    return pin(args.dir, args.step, on=args.on)
