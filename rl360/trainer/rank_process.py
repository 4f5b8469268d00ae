"""`python -m rl360.trainer.rank_process MEETING RANK`: a child rank. It asks to die with rank 0 before it imports anything large."""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    from rl360.trainer.distributed import rank_main

    rank_main(Path(sys.argv[1]), int(sys.argv[2]))
