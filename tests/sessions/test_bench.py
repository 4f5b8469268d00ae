"""The benches of this part run, and end in one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"


def last_line(name: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(BENCH / name), "--json", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_wire() -> None:
    ratios = last_line("wire.py", "--tokens", "4000")
    assert set(ratios) == {"encode_vs_json", "decode_vs_json", "encode_vs_orjson", "decode_vs_orjson"}
    assert all(r > 10 for r in ratios.values())  # a small sample on a busy machine; the claim is made for 58K tokens


def test_session() -> None:
    numbers = last_line("session.py", "--contexts", "300", "2000", "--turns", "3")
    assert numbers["cpu_ms_300"] > 0
    assert numbers["bytes_growth"] > 1


def test_routing() -> None:
    numbers = last_line("routing.py", "--tokens", "2000", "--turns", "6", "--prompt-tokens", "8000", "--attempts", "1")
    assert numbers["full_vs_delta_replies"] > 4, "each row crosses the wire once"
    assert numbers["full_vs_merged_bytes"] > 20
    assert {"cpu_vs_json", "cpu_vs_orjson", "seconds_to_ready"} <= numbers.keys()
