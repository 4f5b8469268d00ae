"""Commands that make files: a checkpoint as Hugging Face reads it, the starting policy, schemas."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl360.cli.options import Commands


def add(sub: Commands) -> None:
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


def _export(args: argparse.Namespace) -> int:
    from rl360.errors import writing
    from rl360.trainer.export import export_hf

    with writing(args.out):
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
