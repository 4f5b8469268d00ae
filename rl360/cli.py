"""The command line: `rl360 run`, `rl360 worker`, `rl360 doctor`, and what reads a finished run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rl360 import __version__

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the `rl360` command; returns the exit status. Errors of input are one line on stderr, status 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "command"):
        parser.print_help()
        return 2
    from rl360.launch.errors import input_errors

    command: Command = args.command
    try:
        return command(args)
    except input_errors() as e:
        print(f"rl360: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output (`| head`) has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _picture(text: str) -> Path:
    if Path(text).suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .svg or .png")
    return Path(text)


def _journal_name(text: str) -> str:
    from rl360.bus.subjects import check_run_name

    try:
        return check_run_name(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="rl360", description=__doc__)
    parser.add_argument("--version", action="version", version=f"rl360 {__version__}")
    sub = parser.add_subparsers(title="commands", metavar="COMMAND")

    run = sub.add_parser("run", help="train: start all workers and watch them")
    run.add_argument("recipe", nargs="?", type=Path, help="a recipe, e.g. recipes/tiny.toml")
    run.add_argument("--dir", type=Path, help="folder of the run (default: runs/NAME)")
    run.add_argument("--steps", type=int, help="same as --set run.steps=N")
    run.add_argument("--seed", type=int, help="same as --set run.seed=N")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override one value")
    run.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in DIR")
    run.add_argument("--plain", action="store_true", help="plain lines instead of the live table")
    run.set_defaults(command=_run)

    worker = sub.add_parser("worker", help="run one worker of a run")
    worker.add_argument("kind")
    worker.add_argument("--dir", type=Path, required=True, help="folder of the run")
    worker.add_argument("--index", type=int, default=0)
    worker.add_argument("--journal", default="", metavar="NAME", help="work on a copied step (replay --into) instead of the run")
    worker.set_defaults(command=_worker)

    chaos = sub.add_parser("chaos", help="kill parts of short runs at seeded moments, and check that nothing is lost or done twice")
    chaos.add_argument("recipe", type=Path, help="a small recipe, e.g. recipes/chaos.toml")
    chaos.add_argument("--kills", type=_count, default=50)
    chaos.add_argument("--seed", type=int, default=0)
    chaos.add_argument("--only", default="", metavar="NAME", help="kill only what is called so, e.g. engine (default: everything)")
    chaos.add_argument("--dir", type=Path, default=Path("runs/chaos"), help="new folder for the runs (default: runs/chaos)")
    chaos.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override one value")
    chaos.add_argument("--keep", action="store_true", help="keep the folders of runs without a problem")
    chaos.add_argument("--json", type=Path, metavar="FILE", help="write the report, every kill included, to FILE")
    chaos.set_defaults(command=_chaos)

    push = sub.add_parser("push", help="plan a weight push on paper")
    plan = push.add_subparsers(title="push commands", metavar="COMMAND", required=True).add_parser(
        "plan", help="calls and bytes of both paths, from the shape of a recipe's policy"
    )
    plan.add_argument("recipe", type=Path, help="a recipe, e.g. recipes/moe-375b.toml")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override one value")
    plan.add_argument(
        "--broadcast-rate", type=float, metavar="GB/S", help="that a broadcast over all GPUs takes in; with it, seconds are told"
    )
    plan.add_argument("--direct-rate", type=float, metavar="GB/S", help="between one trainer rank and one GPU (default: the broadcast's)")
    plan.add_argument("--call-seconds", type=float, default=0.0, metavar="S", help="of one update call, beside its bytes")
    plan.add_argument("--json", action="store_true", dest="as_json")
    plan.set_defaults(command=_push_plan)

    doctor = sub.add_parser("doctor", help="check this machine")
    doctor.set_defaults(command=_doctor)

    audit = sub.add_parser("audit", help="check a run's invariants from its journal")
    audit.add_argument("dir", type=Path)
    audit.add_argument("--json", action="store_true")
    audit.set_defaults(command=_audit)

    explain = sub.add_parser("explain", help="where the gradient of a step went, from the journal")
    explain.add_argument("dir", type=Path)
    explain.add_argument("--step", type=int, required=True)
    explain.add_argument("--json", action="store_true")
    explain.add_argument("--html", type=Path, metavar="FILE", help="write a page that works without a server")
    explain.add_argument("--journal", default="", metavar="NAME", help="of a copy that replay --into made")
    explain.set_defaults(command=_explain)

    replay = sub.add_parser("replay", help="decide a step again, under the recorded rules or others")
    replay.add_argument("dir", type=Path)
    replay.add_argument("--step", type=int, help="default: every trained step, a line each")
    replay.add_argument("--with", dest="with_", default="", metavar="RULES", help="a TOML file of rules, or legacy, miles, slime, rl360")
    replay.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="change one rule")
    replay.add_argument("--gradient", action="store_true", help="measure the real gradient, from the step's checkpoint")
    replay.add_argument("--json", action="store_true")
    replay.add_argument("--into", type=_journal_name, metavar="NAME", help="copy the step into a journal of its own, for live workers")
    replay.add_argument("--before", default="", choices=("", "merger", "filter", "trainer", "scheduler"), help="leave out what they say")
    replay.add_argument("--journal", default="", metavar="NAME", help="of a copy that --into made")
    replay.add_argument("--picture", type=_picture, metavar="FILE", help="draw what both sets of rules log, over all steps (.svg or .png)")
    replay.set_defaults(command=_replay)

    _journal_parser(sub.add_parser("journal", help="look into a run's journal, carry it in one file, keep it within bounds"))

    trace = sub.add_parser("trace", help="one attempt's spans, rebuilt from the journal")
    trace.add_argument("dir", type=Path)
    trace.add_argument("attempt")
    trace.add_argument("--otlp", type=Path, metavar="FILE", help="write OTLP JSON to FILE")
    trace.set_defaults(command=_trace)

    summary = sub.add_parser("summary", help="summary and reward picture of a run")
    summary.add_argument("dir", type=Path, nargs="+", help="folders of runs; several are drawn in one picture")
    summary.add_argument("--picture", type=_picture, help="where to draw (.svg or .png; default: DIR/reward.svg)")
    summary.set_defaults(command=_summary)

    export = sub.add_parser("export", help="write a checkpoint in Hugging Face layout")
    export.add_argument("checkpoint", type=Path, help="a checkpoint's folder, or a run's (its newest)")
    export.add_argument("out", type=Path)
    export.set_defaults(command=_export)

    warmstart = sub.add_parser("warmstart", help="make the starting policy again")
    warmstart.add_argument("out", type=Path)
    warmstart.add_argument("--seed", type=int, default=0)
    warmstart.set_defaults(command=_warmstart)

    schemas = sub.add_parser("schemas", help="write JSON Schema of every event and the AsyncAPI document")
    schemas.add_argument("--out", type=Path, required=True)
    schemas.set_defaults(command=_schemas)
    return parser


def _journal_parser(journal: argparse.ArgumentParser) -> None:
    sub = journal.add_subparsers(title="journal commands", metavar="COMMAND", required=True)

    ls = sub.add_parser("ls", help="what each step has: events by type, sequences, time, bytes")
    ls.add_argument("dir", type=Path)
    ls.set_defaults(command=_journal_ls)

    tail = sub.add_parser("tail", help="the last events, one a line")
    tail.add_argument("dir", type=Path)
    tail.add_argument("--lines", type=_count, default=20, metavar="N")
    tail.add_argument("--follow", action="store_true", help="go on with what a running run publishes")
    tail.add_argument("--type", action="append", default=[], metavar="T", dest="types")
    tail.add_argument("--step", type=int)
    tail.add_argument("--attempt", default="", metavar="A")
    tail.add_argument("--json", action="store_true")
    tail.set_defaults(command=_journal_tail)

    export = sub.add_parser("export", help="write events and the blobs they need into one file")
    export.add_argument("dir", type=Path)
    export.add_argument("file", type=Path)
    export.add_argument("--step", action="append", type=int, default=[], metavar="N", dest="steps", help="only what this step needs")
    export.add_argument("--with-checkpoint", action="store_true", help="the weights that the steps started from as well")
    export.set_defaults(command=_journal_export)

    import_ = sub.add_parser("import", help="lay an exported file down as a folder to read")
    import_.add_argument("file", type=Path)
    import_.add_argument("dir", type=Path)
    import_.set_defaults(command=_journal_import)

    prune = sub.add_parser("prune", help="remove blobs and checkpoints that only old steps need; events stay")
    prune.add_argument("dir", type=Path)
    prune.add_argument("--keep-steps", type=int, required=True, metavar="N")
    prune.set_defaults(command=_journal_prune)

    for name, text in (("pin", "keep a step from being pruned"), ("unpin", "let a step be pruned again")):
        pin = sub.add_parser(name, help=text)
        pin.add_argument("dir", type=Path)
        pin.add_argument("--step", type=int, required=True)
        pin.set_defaults(command=_journal_pin, on=name == "pin")


def _run(args: argparse.Namespace) -> int:
    from rl360.launch.run import run

    overrides = list(args.overrides)
    if args.steps is not None:
        overrides.append(f"run.steps={args.steps}")
    if args.seed is not None:
        overrides.append(f"run.seed={args.seed}")
    return run(recipe=args.recipe, path=args.dir, resume=args.resume, overrides=tuple(overrides), plain=args.plain)


def _worker(args: argparse.Namespace) -> int:
    from rl360.launch.kinds import KINDS
    from rl360.launch.worker_main import run_worker

    if args.kind not in KINDS:
        print(f"rl360: unknown worker kind {args.kind!r}; known: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    run_worker(args.kind, args.index, args.dir, args.journal)
    return 0


def _chaos(args: argparse.Namespace) -> int:
    from rl360.launch.chaos.harness import chaos

    return chaos(
        args.recipe, tuple(args.overrides), args.dir, kills=args.kills, seed=args.seed, only=args.only, keep=args.keep, out=args.json
    )


def _push_plan(args: argparse.Namespace) -> int:
    from rl360.engines.plan_cost import Rates
    from rl360.launch.push_plan import push_plan

    rates = None
    if args.broadcast_rate:
        direct = args.direct_rate or args.broadcast_rate
        rates = Rates(broadcast=args.broadcast_rate * 1e9, direct=direct * 1e9, call=args.call_seconds)
    return push_plan(args.recipe, tuple(args.overrides), rates, as_json=args.as_json)


def _doctor(args: argparse.Namespace) -> int:
    from rl360.launch.doctor import doctor

    return doctor()


def _audit(args: argparse.Namespace) -> int:
    from rl360.launch.reports import audit_run

    return audit_run(args.dir, as_json=args.json)


def _explain(args: argparse.Namespace) -> int:
    from rl360.launch.decide_again import explain_step

    return explain_step(args.dir, args.step, journal=args.journal, as_json=args.json, page=args.html)


def _replay(args: argparse.Namespace) -> int:
    if args.step is None:
        return _replay_all(args)
    from rl360.launch.decide_again import copy_into, replay_step

    if args.into:
        return copy_into(args.dir, args.step, args.into, before=args.before)
    return replay_step(
        args.dir,
        args.step,
        journal=args.journal,
        with_=args.with_,
        overrides=tuple(args.overrides),
        gradient=args.gradient,
        as_json=args.json,
    )


def _journal_ls(args: argparse.Namespace) -> int:
    from rl360.launch.journal_commands import ls

    return ls(args.dir)


def _journal_tail(args: argparse.Namespace) -> int:
    from rl360.journal.lines import Filter
    from rl360.launch.journal_commands import tail

    chosen = Filter(tuple(args.types), args.step, args.attempt)
    return tail(args.dir, chosen, last=args.lines, follow=args.follow, as_json=args.json)


def _journal_export(args: argparse.Namespace) -> int:
    from rl360.launch.journal_commands import export

    return export(args.dir, args.file, tuple(args.steps), with_checkpoint=args.with_checkpoint)


def _journal_import(args: argparse.Namespace) -> int:
    from rl360.launch.journal_commands import import_

    return import_(args.file, args.dir)


def _journal_prune(args: argparse.Namespace) -> int:
    from rl360.launch.keeping import prune

    return prune(args.dir, args.keep_steps)


def _journal_pin(args: argparse.Namespace) -> int:
    from rl360.launch.keeping import pin

    return pin(args.dir, args.step, on=args.on)


def _replay_all(args: argparse.Namespace) -> int:
    from rl360.config import ConfigError
    from rl360.launch.every_step import replay_steps

    if args.into or args.gradient or args.journal:
        raise ConfigError("--into, --gradient and --journal are about one step: name it with --step")
    return replay_steps(args.dir, with_=args.with_, overrides=tuple(args.overrides), as_json=args.json, picture=args.picture)


def _trace(args: argparse.Namespace) -> int:
    from rl360.launch.reports import trace_attempt

    return trace_attempt(args.dir, args.attempt, args.otlp)


def _summary(args: argparse.Namespace) -> int:
    from rl360.launch.reports import summarise

    return summarise(args.dir, args.picture)


def _export(args: argparse.Namespace) -> int:
    from rl360.trainer.export import export_hf

    export_hf(args.checkpoint, args.out)
    print(f"wrote {args.out}")
    return 0


def _warmstart(args: argparse.Namespace) -> int:
    from rl360.tiny.warmstart import main as warmstart

    warmstart(args.out, seed=args.seed)
    return 0


def _schemas(args: argparse.Namespace) -> int:
    from rl360.bus.schemas import write_schemas

    for path in write_schemas(args.out):
        print(path)
    return 0
