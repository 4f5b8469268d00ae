#!/usr/bin/env python3
"""Record the small journal that later versions must still read, audit and decide again: tests/fixtures/journal-vN/.

Two steps of the dense policy and of the one with experts, one step ahead, with sandboxes that are killed on cue. Record a new one beside
the old ones when SCHEMA_VERSION changes; an old one is never recorded again, since it stands for journals that users have.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = (
    "run.steps=2",
    "run.schedule=one_step",
    "tasks.groups_per_step=4",
    "tasks.attempts_per_group=4",
    "tasks.pool=8",
    "tasks.eval_pool=2",
    "tasks.eval_every=2",
    "runners.slots=8",
    'faults=[{step = 1, kind = "sandbox_kill", fraction = 0.2}]',
)


def record(recipe: str, out: Path) -> None:
    """Run a recipe in small and export its journal."""
    with tempfile.TemporaryDirectory() as root:
        sets = [part for item in SMALL for part in ("--set", item)]
        rl360(["run", str(ROOT / "recipes" / f"{recipe}.toml"), "--dir", f"{root}/run", "--plain", *sets])
        rl360(["audit", f"{root}/run"])
        rl360(["journal", "export", f"{root}/run", str(out / f"{recipe}.zip")])


def rl360(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "rl360", *arguments], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a new folder, e.g. tests/fixtures/journal-v1")
    out: Path = parser.parse_args().out.absolute()
    out.mkdir(parents=True)
    for recipe in ("tiny", "tiny-moe"):
        record(recipe, out)


if __name__ == "__main__":
    main()
