"""Commands that show what a choice does before a cluster pays for it."""

from __future__ import annotations

import argparse

from rl360.cli.options import Commands, count, overrides, rate


def add(sub: Commands) -> None:
    simulate = sub.add_parser("simulate", help="see what a choice does before a cluster pays for it")
    starts = simulate.add_subparsers(title="simulations", metavar="WHAT", required=True).add_parser(
        "sandboxes", help="starts on nodes behind a registry: at once or in waves, anywhere or pinned, reserved or not"
    )
    starts.add_argument("--starts", type=count, help="sandboxes asked for at once (default: 8192)")
    starts.add_argument("--nodes", type=count, help="default: 128")
    starts.add_argument("--images", type=count, help="that they are made from (default: 512)")
    starts.add_argument("--registry-rate", type=rate, metavar="MB/S", help="of the registry, in all (default: 5000)")
    starts.add_argument("--seed", type=int, default=0)
    overrides(starts, "any assumption that it prints")
    starts.add_argument("--json", action="store_true", dest="as_json")
    starts.set_defaults(command=_sandboxes)


def _sandboxes(args: argparse.Namespace) -> int:
    from rl360.launch.simulate import simulate_sandboxes

    given = {key: getattr(args, key) for key in ("starts", "nodes", "images", "registry_rate")}
    return simulate_sandboxes({k: v for k, v in given.items() if v is not None}, tuple(args.overrides), args.seed, as_json=args.as_json)
