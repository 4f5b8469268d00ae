"""Commands that read a run: audit, explain, replay, trace, summary."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl360.cli.options import Commands, journal_name, overrides, picture


def add(sub: Commands) -> None:
    audit = sub.add_parser("audit", help="check a run's invariants from its journal")
    audit.add_argument("dir", type=Path)
    audit.add_argument("--json", action="store_true")
    audit.set_defaults(command=_audit)

    explain = sub.add_parser("explain", help="where the gradient of a step went, from the journal")
    explain.add_argument("dir", type=Path)
    explain.add_argument("--step", type=int, required=True)
    explain.add_argument("--json", action="store_true")
    explain.add_argument("--html", type=Path, metavar="FILE", help="write a page that works without a server")
    explain.add_argument("--journal", type=journal_name, metavar="NAME", help="of a copy that replay --into made")
    explain.set_defaults(command=_explain)

    replay = sub.add_parser("replay", help="decide a step again, under the recorded rules or others")
    replay.add_argument("dir", type=Path)
    replay.add_argument("--step", type=int, help="default: every trained step, a line each")
    replay.add_argument("--with", dest="with_", default="", metavar="RULES", help="a TOML file of rules, or legacy, miles, slime, rl360")
    overrides(replay, "change one rule")
    replay.add_argument("--gradient", action="store_true", help="measure the real gradient, from the step's checkpoint")
    replay.add_argument("--json", action="store_true")
    replay.add_argument("--into", type=journal_name, metavar="NAME", help="copy the step into a journal of its own, for live workers")
    replay.add_argument("--before", default="", choices=("", "merger", "filter", "trainer", "scheduler"), help="leave out what they say")
    replay.add_argument("--journal", type=journal_name, metavar="NAME", help="of a copy that --into made")
    replay.add_argument("--picture", type=picture, metavar="FILE", help="draw what both sets of rules log, over all steps (.svg or .png)")
    replay.set_defaults(command=_replay)

    trace = sub.add_parser("trace", help="one attempt's spans, rebuilt from the journal")
    trace.add_argument("dir", type=Path)
    trace.add_argument("attempt")
    trace.add_argument("--otlp", type=Path, metavar="FILE", help="write OTLP JSON to FILE")
    trace.set_defaults(command=_trace)

    summary = sub.add_parser("summary", help="summary and reward picture of a run")
    summary.add_argument("dir", type=Path, nargs="+", help="folders of runs; several are drawn in one picture")
    summary.add_argument("--picture", type=picture, help="where to draw (.svg or .png; default: DIR/reward.svg)")
    summary.set_defaults(command=_summary)


def _audit(args: argparse.Namespace) -> int:
    from rl360.launch.reports import audit_run

    return audit_run(args.dir, as_json=args.json)


def _explain(args: argparse.Namespace) -> int:
    from rl360.launch.decide_again import explain_step

    return explain_step(args.dir, args.step, journal=args.journal or "", as_json=args.json, page=args.html)


def _replay(args: argparse.Namespace) -> int:
    if args.step is None:
        return _replay_all(args)
    from rl360.launch.decide_again import copy_into, replay_step

    if args.into:
        return copy_into(args.dir, args.step, args.into, before=args.before)
    return replay_step(
        args.dir,
        args.step,
        journal=args.journal or "",
        with_=args.with_,
        overrides=tuple(args.overrides),
        gradient=args.gradient,
        as_json=args.json,
    )


def _trace(args: argparse.Namespace) -> int:
    from rl360.launch.reports import trace_attempt

    return trace_attempt(args.dir, args.attempt, args.otlp)


def _summary(args: argparse.Namespace) -> int:
    from rl360.launch.reports import summarise

    return summarise(args.dir, args.picture)


def _replay_all(args: argparse.Namespace) -> int:
    from rl360.config import ConfigError
    from rl360.launch.every_step import replay_steps

    if args.into or args.gradient or args.journal:
        raise ConfigError("--into, --gradient and --journal are about one step: name it with --step")
    return replay_steps(args.dir, with_=args.with_, overrides=tuple(args.overrides), as_json=args.json, picture=args.picture)
