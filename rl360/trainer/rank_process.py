"""`python -m rl360.trainer.rank_process MEETING PARENT RANK`: a child rank. It asks to die with rank 0 before it imports anything large."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main(meeting: Path, parent: int, rank: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # rank 0 was gone before this process had asked
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    from rl360.trainer.distributed import rank_main

    rank_main(meeting, rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
