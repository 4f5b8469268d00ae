"""`bench/trainer.py --smoke` measures tiny shapes on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_bench_of_the_trainer_runs_small_on_a_cpu(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "bench/trainer.py", "--smoke", "--recompute", "full", "--json", str(out)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=True, timeout=170)
    cases = json.loads(out.read_text())["cases"]
    assert {(c["shape"], c["lengths"]) for c in cases} == {(s, k) for s in ("dense", "moe") for k in ("one", "mixed")}
    assert all(c["tflops"] > 0 and c["grad_norm"] > 0 for c in cases)
