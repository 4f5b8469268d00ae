"""`python -m rl360.trainer.rank_process MEETING PARENT RANK LINE`: a child rank.

It asks to die with rank 0 before it imports anything large. LINE is the descriptor of a socket (`expert_lines`).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rl360.child import die_with


def main(meeting: Path, parent: int, rank: int, line: int) -> None:
    die_with(parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    from rl360.trainer.distributed import rank_main

    rank_main(meeting, rank, line)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
