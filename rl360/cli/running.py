"""Commands that run something: training, a worker, drills; and what is looked at before."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rl360.cli.options import Commands, count, duration, host, journal_name, overrides, rate


def add(sub: Commands) -> None:
    run = sub.add_parser("run", help="train: start all workers and watch them")
    run.add_argument("recipe", nargs="?", type=Path, help="a recipe, e.g. recipes/tiny.toml")
    run.add_argument("--dir", type=Path, help="folder of the run (default: runs/NAME)")
    run.add_argument("--steps", type=int, help="same as --set run.steps=N")
    run.add_argument("--seed", type=int, help="same as --set run.seed=N")
    overrides(run)
    run.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in DIR")
    run.add_argument("--plain", action="store_true", help="plain lines instead of the live table")
    run.set_defaults(command=_run)

    worker = sub.add_parser("worker", help="run one worker of a run")
    worker.add_argument("kind")
    worker.add_argument("--dir", type=Path, required=True, help="folder of the run")
    worker.add_argument("--index", type=int, default=0)
    worker.add_argument("--journal", type=journal_name, metavar="NAME", help="work on a copied step (replay --into) instead of the run")
    worker.add_argument("--host", type=host, default="127.0.0.1", help='where other workers reach it; "hostname": by this machine\'s name')
    worker.set_defaults(command=_worker)

    chaos = sub.add_parser("chaos", help="kill parts of short runs at seeded moments, and check that nothing is lost or done twice")
    chaos.add_argument("recipe", type=Path, help="a small recipe, e.g. recipes/chaos.toml")
    chaos.add_argument("--kills", type=count, default=50)
    chaos.add_argument("--seed", type=int, default=0)
    chaos.add_argument("--only", default="", metavar="NAME", help="kill only what is called so, e.g. engine (default: everything)")
    chaos.add_argument("--dir", type=Path, default=Path("runs/chaos"), help="new folder for the runs (default: runs/chaos)")
    overrides(chaos)
    chaos.add_argument("--keep", action="store_true", help="keep the folders of runs without a problem")
    chaos.add_argument("--json", type=Path, metavar="FILE", help="write the report, every kill included, to FILE")
    chaos.set_defaults(command=_chaos)

    push = sub.add_parser("push", help="plan a weight push on paper")
    plan = push.add_subparsers(title="push commands", metavar="COMMAND", required=True).add_parser(
        "plan", help="calls and bytes of both paths, from the shape of a recipe's policy"
    )
    plan.add_argument("recipe", type=Path, help="a recipe, e.g. recipes/moe-375b.toml")
    overrides(plan)
    plan.add_argument(
        "--broadcast-rate", type=rate, metavar="GB/S", help="that a broadcast over all GPUs takes in; with it, seconds are told"
    )
    plan.add_argument("--direct-rate", type=rate, metavar="GB/S", help="between one trainer rank and one GPU (default: the broadcast's)")
    plan.add_argument("--call-seconds", type=duration, default=0.0, metavar="S", help="of one update call, beside its bytes")
    plan.add_argument("--json", action="store_true", dest="as_json")
    plan.set_defaults(command=_push_plan)

    doctor = sub.add_parser("doctor", help="check this machine")
    doctor.set_defaults(command=_doctor)


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
    run_worker(args.kind, args.index, args.dir, args.journal or "", args.host)
    return 0


def _chaos(args: argparse.Namespace) -> int:
    from rl360.launch.chaos.harness import chaos

    return chaos(
        args.recipe, tuple(args.overrides), args.dir, kills=args.kills, seed=args.seed, only=args.only, keep=args.keep, out=args.json
    )


def _push_plan(args: argparse.Namespace) -> int:
    from rl360.config import ConfigError
    from rl360.engines.plan_cost import Rates
    from rl360.launch.push_plan import push_plan

    rates = None
    if args.broadcast_rate is None and (args.direct_rate is not None or args.call_seconds):
        raise ConfigError("--direct-rate and --call-seconds tell seconds together with --broadcast-rate: give that as well")
    if args.broadcast_rate is not None:
        direct = args.direct_rate or args.broadcast_rate
        rates = Rates(broadcast=args.broadcast_rate * 1e9, direct=direct * 1e9, call=args.call_seconds)
    return push_plan(args.recipe, tuple(args.overrides), rates, as_json=args.as_json)


def _doctor(args: argparse.Namespace) -> int:
    from rl360.launch.doctor import doctor

    return doctor()
