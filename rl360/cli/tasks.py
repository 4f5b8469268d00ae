"""`rl360 tasks`: whether tasks in Harbor's format can be used, whether their verifiers tell, and how hard a policy finds them."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl360.cli.options import Commands, count, overrides

CACHE = Path("runs/tasks")


def add(commands: Commands) -> None:
    tasks = commands.add_parser("tasks", help="lint, qualify and calibrate a folder of Harbor-format tasks")
    sub = tasks.add_subparsers(title="tasks commands", metavar="COMMAND", required=True)

    lint = sub.add_parser("lint", help="what can't be carried out, with the remedy, and what is worth knowing")
    lint.add_argument("dir", type=Path)
    lint.add_argument("--sandbox", choices=("bwrap", "docker", "subprocess"), default="bwrap", help="kind of sandbox (default: bwrap)")
    lint.add_argument("--json", action="store_true")
    lint.set_defaults(command=_lint)

    qualify = sub.add_parser("qualify", help="a no-op must get the lowest reward, the task's own solution the highest")
    qualify.add_argument("dir", type=Path)
    qualify.add_argument("--sandbox", choices=("bwrap", "docker", "subprocess"), help="kind of sandbox (default: the recipe's)")
    _common(qualify)
    qualify.set_defaults(command=_qualify)

    calibrate = sub.add_parser("calibrate", help="pass-rate bands of a policy from some attempts at each task")
    calibrate.add_argument("dir", type=Path)
    calibrate.add_argument("--url", help="an OpenAI-compatible URL, up to and with /v1 (default: the recipe's own policy is run)")
    calibrate.add_argument("--model", metavar="NAME", help="of the URL")
    calibrate.add_argument("--key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable that holds the key of the URL")
    calibrate.add_argument("--attempts", type=count, default=16, metavar="N")
    calibrate.add_argument("--seed", type=int, default=0)
    calibrate.add_argument("--workers", type=count, default=4, metavar="N", help="attempts at once, with --url")
    _common(calibrate)
    calibrate.set_defaults(command=_calibrate)

    serve = sub.add_parser(
        "serve", help="the HTTP routes that Miles calls: /run, /flush, /health; a reward is null where no verifier wrote one"
    )
    serve.add_argument("dir", type=Path)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=count, default=11000)
    serve.add_argument("--slots", type=count, default=16, metavar="N", help="attempts at once; others wait")
    _common(serve, json=False)
    serve.set_defaults(command=_serve)


def _common(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    parser.add_argument("--recipe", type=Path, help="whose sandbox, agent and budgets are used (default: the defaults)")
    overrides(parser, "override one value of the recipe")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"where results are kept (default: {CACHE})")
    if json:
        parser.add_argument("--json", action="store_true")


def _lint(args: argparse.Namespace) -> int:
    from rl360.launch.task_commands import lint_tasks

    return lint_tasks(args.dir, args.sandbox, as_json=args.json)


def _qualify(args: argparse.Namespace) -> int:
    from rl360.launch.task_commands import qualify_tasks

    overrides = [*args.overrides, *([f"sandbox.kind={args.sandbox}"] if args.sandbox else [])]
    return qualify_tasks(args.dir, args.recipe, tuple(overrides), args.cache, as_json=args.json)


def _calibrate(args: argparse.Namespace) -> int:
    from rl360.config import ConfigError
    from rl360.launch import calibrate_tasks as calibrating

    asked = calibrating.Asked(args.dir, args.recipe, tuple(args.overrides), args.cache, args.attempts, args.seed)
    if args.url is not None:
        if args.model is None:
            raise ConfigError("--url needs --model: the name that the server knows the policy by")
        return calibrating.by_url(asked, args.url, args.model, args.key_env, workers=args.workers, as_json=args.json)
    if args.recipe is None or args.model is not None:
        raise ConfigError("name the policy: --recipe FILE runs the recipe's own, --url URL --model NAME asks a server")
    return calibrating.by_recipe(asked, as_json=args.json)


def _serve(args: argparse.Namespace) -> int:
    from rl360.launch.serve_tasks import serve

    return serve(args.dir, args.recipe, tuple(args.overrides), args.cache, args.host, args.port, args.slots)
