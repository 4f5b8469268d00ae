"""A run over several machines or containers: `init` lays its folder out, then each process is started by whatever starts processes there.

All of them see the run's folder (a volume, a network file system). The rest is `rl360 worker KIND --dir DIR --host hostname`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl360.cli.options import Commands, host, overrides


def add(sub: Commands) -> None:
    cluster = sub.add_parser("cluster", help="a run whose processes others start: docker compose, Kubernetes, Slurm")
    commands = cluster.add_subparsers(title="cluster commands", metavar="COMMAND", required=True)

    init = commands.add_parser("init", help="lay the run's folder out; one that is there is gone on with")
    init.add_argument("recipe", type=Path, help="a recipe, e.g. recipes/tiny.toml")
    init.add_argument("--dir", type=Path, required=True, help="folder of the run, which every process sees")
    overrides(init)
    init.add_argument("--nats-host", type=host, default="nats")
    init.add_argument("--gateway-host", type=host, default="gateway")
    init.add_argument("--session-host", type=host, default="session", help='"{}" in it stands for the index: session-{}')
    init.set_defaults(command=_init)

    for name, what in (("nats", "nats-server"), ("gateway", "the gateway")):
        serve = commands.add_parser(name, help=f"become {what} of the run")
        serve.add_argument("--dir", type=Path, required=True, help="folder of the run")
        serve.set_defaults(command=_serve, name=name)

    lead = commands.add_parser("lead", help="open the run's journal, show the run, and record its end")
    lead.add_argument("--dir", type=Path, required=True, help="folder of the run")
    lead.add_argument("--plain", action="store_true", help="plain lines instead of the live table")
    lead.set_defaults(command=_lead)


def _init(args: argparse.Namespace) -> int:
    from rl360.launch.cluster import init
    from rl360.launch.rundir import Hosts

    hosts = Hosts(nats=args.nats_host, gateway=args.gateway_host, session=args.session_host)
    init(args.recipe, tuple(args.overrides), args.dir, hosts)
    return 0


def _serve(args: argparse.Namespace) -> int:
    from rl360.launch.cluster import serve

    serve(args.name, args.dir)


def _lead(args: argparse.Namespace) -> int:
    from rl360.launch.run import lead

    return lead(args.dir, plain=args.plain)
