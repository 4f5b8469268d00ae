"""CPU and wall-clock of a sandbox's life, beside its peer: a fresh bwrap for each command.

    python bench/sandbox.py [--n 40] [--json]

CPU is that of this process and of all its children; a step of 256 attempts on 2 cores has about 110 ms for each.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rl360.agents.sandbox.base import Limits
from rl360.agents.sandbox.host import detect
from rl360.agents.sandbox.leases import Lease
from rl360.agents.sandbox.make import SandboxMaker
from rl360.agents.staging import Stage
from rl360.agents.tasks import load_task
from rl360.agents.verify import verify
from rl360.config import Sandbox as SandboxSection

COMMANDS = ("cat answer.txt", "sed -i 's/0/42/' answer.txt", "sh test.sh", "echo COMPLETE")
FILES = {
    "task.toml": 'schema_version = "1.4"\n',
    "instruction.md": "Write 42 to answer.txt",
    "environment/answer.txt": "0\n",
    "environment/test.sh": 'if [ "$(cat answer.txt)" = 42 ]; then echo PASS; else echo FAIL; fi\n',
    "tests/test.sh": '[ "$(cat /app/answer.txt)" = 42 ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
}


def cpu() -> float:
    """CPU seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


class Meter:
    """CPU and wall milliseconds by name, as means over all calls."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}

    def run(self, name: str, work: Callable[[], object]) -> None:
        cpu_before, wall_before = cpu(), time.perf_counter()
        work()
        row = self.rows.setdefault(name, [0.0, 0.0, 0.0])
        for i, value in enumerate((1.0, cpu() - cpu_before, time.perf_counter() - wall_before)):
            row[i] += value

    def cpu_ms(self, name: str) -> float:
        count, used, _ = self.rows[name]
        return 1000 * used / count

    def wall_ms(self, name: str) -> float:
        count, _, wall = self.rows[name]
        return 1000 * wall / count


def bench(n: int, root: Path) -> Meter:
    for name, text in FILES.items():
        path = root / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    task, lease = load_task(root / "task"), Lease(root / "sandboxes", "bench")
    staged, maker, meter = Stage(lease.folder / "tasks").get(task), SandboxMaker(SandboxSection(), lease, "bench"), Meter()
    for number in range(n):
        sandbox = maker.make(f"s{number}", number, task, staged, 20.0)
        steps: list[tuple[str, Callable[[], object]]] = [
            ("start", sandbox.start),
            ("exec :", lambda s=sandbox: s.exec(":", 10)),
            *((f"exec {c.split()[0]}", lambda s=sandbox, c=c: s.exec(c, 10)) for c in COMMANDS),
            ("kill all", sandbox.kill_all),
            ("verify", lambda s=sandbox: verify(s, task, staged, started=time.time(), timeout=20.0)),
            ("close", sandbox.close),
        ]
        for name, work in steps:
            meter.run(name, work)
        meter.run("peer: bwrap for each command", lambda s=sandbox: fresh_bwrap(root))
        meter.run("plain bash, no sandbox", lambda: subprocess.run(["bash", "-c", ":"], check=True))
    maker.close()
    lease.release()
    return meter


def fresh_bwrap(root: Path) -> None:
    host, limits = detect(), Limits(memory_mb=256, storage_mb=256, pids=64, cpus=1.0)
    subprocess.run(
        [*host.namespaces(host.uid_of(0), limits), "--bind", str(root / "task"), "/app", "--chdir", "/app", "bash", "-c", ":"], check=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=40, help="sandboxes")
    parser.add_argument("--json", action="store_true", help="one last line of JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meter = bench(given.n, Path(folder))
    print(f"{'':32}{'CPU ms':>9}{'wall ms':>9}")
    for name in meter.rows:
        print(f"{name:32}{meter.cpu_ms(name):9.2f}{meter.wall_ms(name):9.2f}")
    parts = [name for name in meter.rows if not name.startswith(("peer", "plain", "exec :"))]
    attempt = sum(map(meter.cpu_ms, parts))
    print(f"{'an attempt (4 commands)':32}{attempt:9.2f}{sum(map(meter.wall_ms, parts)):9.2f}")
    if given.json:
        peer = meter.cpu_ms("peer: bwrap for each command")
        print(json.dumps({"attempt_cpu_ms": round(attempt, 2), "fresh_bwrap_vs_exec": round(peer / meter.cpu_ms("exec :"), 2)}))


if __name__ == "__main__":
    main()
