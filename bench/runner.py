"""A runner's own CPU for each attempt at a task of many files, beside Harbor's for each trial of the same folder.

    python bench/runner.py [--files 1000] [--n 40] [--rounds 4] [--harbor PYTHON] [--json]

Agent and sandbox do nothing on both sides, so what is left is what runs an attempt. Ours is the real runner on a real
nats-server with sessions in a process of their own; the CPU is that of the runner's process. Rounds go A B A B.
`--harbor` names a Python >= 3.12 with harbor; without it only ours is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

from rl360.agents import runner
from rl360.agents.harness.base import Assignment
from rl360.agents.lives import Lives
from rl360.agents.sandbox.base import ExecResult, Sealed
from rl360.agents.sandbox.leases import Lease
from rl360.agents.sandbox.make import SandboxMaker
from rl360.agents.session import Sessions
from rl360.agents.tasks import Task, load_task
from rl360.bus import nats_server
from rl360.bus.address import Addresses, Secrets
from rl360.bus.blobs import BlobStore
from rl360.bus.client import Bus, BusAddress
from rl360.bus.events import AgentEnd, Budgets, Purpose, RolloutAdmitted, attempt_id
from rl360.bus.worker import WorkerContext
from rl360.child import Child
from rl360.config import parse
from rl360.ports import free_ports

RUN, ADMIN, SLOTS = "bench", "admin-key", 8


@dataclass
class NoSandbox:
    """Does nothing, and its sealed run writes a reward."""

    id: str
    root: Path

    @property
    def workdir(self) -> Path:
        return self.root / "app"

    def start(self) -> None:
        self.workdir.mkdir(parents=True)

    def exec(self, command: str, timeout: float, env: Mapping[str, str] | None = None) -> ExecResult:
        return ExecResult(0, "")

    def kill_all(self) -> float:
        return time.time()

    def run_sealed(self, run: Sealed, timeout: float) -> ExecResult:
        (run.writable["/logs/verifier"] / "reward.txt").write_text("1\n")
        return ExecResult(0, "")

    def oom_kills(self) -> int:
        return 0

    def abort(self) -> None:
        return

    def close(self) -> None:
        shutil.rmtree(self.root)


class NoAgent:
    def __init__(self, given: Assignment) -> None:
        self._given = given

    def run(self) -> AgentEnd:
        return AgentEnd.SUBMITTED

    def cancel(self) -> None:
        return


def write_task(folder: Path, files: int) -> Task:
    parts = {"task.toml": 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n', "instruction.md": "Do nothing.\n"}
    parts |= {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n", "environment/Dockerfile": "FROM debian\nCOPY . /app/\n"}
    parts |= {f"environment/src/d{i % 20}/f{i}.py": f"x = {i}\n" * 40 for i in range(files)}
    for name, text in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return load_task(folder)


def serve_sessions(port: int) -> None:
    """Opens and closes sessions, in a process of its own."""

    async def opened(request: web.Request) -> web.Response:
        name = (await request.json())["session"]
        return web.json_response({"session": name, "base_url": f"http://127.0.0.1:{port}/sessions/{name}/v1", "key": "k"})

    async def closed(request: web.Request) -> web.Response:
        return web.json_response({"session": request.match_info["id"], "reason": "submitted", "turns": 0, "branches": 0})

    app = web.Application()
    app.router.add_post("/sessions", opened)
    app.router.add_delete("/sessions/{id}", closed)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


class Ours:
    """One runner with everything real but its agent and sandbox."""

    def __init__(self, bus: Bus, ctx: WorkerContext, task: Task) -> None:
        self._bus, self._ctx, self._task = bus, ctx, task
        self._made = self._left = 0
        self._go, self._over = asyncio.Event(), asyncio.Event()

    async def measure(self, n: int) -> float:
        """CPU seconds of one of `n` attempts; they are admitted before the clock starts."""
        for _ in range(n):
            await self._bus.publish(self._admitted())
        self._left, before = n, time.process_time()
        self._over.clear()
        self._go.set()
        await self._over.wait()
        used = time.process_time() - before
        self._go.clear()
        return used / n

    @asynccontextmanager
    async def running(self, lease: Lease, pool: ThreadPoolExecutor) -> AsyncIterator[Ours]:
        ctx = self._ctx
        maker = SandboxMaker(ctx.config.sandbox, lease, RUN)
        async with Sessions(ctx.addresses.sessions, ADMIN) as sessions:
            lives = await Lives.read(ctx.bus)
            shop = runner._shop(ctx, lease, maker, sessions, pool, lives.started)
            shop = replace(shop, sandbox_of=lambda a, session, *_: NoSandbox(session, lease.folder / session), harness_of=NoAgent)
            ours = _Gated(ctx, shop, lives, self)
            running = asyncio.create_task(ours.run())
            yield self
            ctx.stop.set()
            await running

    def _admitted(self) -> RolloutAdmitted:
        self._made += 1
        budgets = Budgets(queue=600, setup=60, agent=60, verify=60, collect=60, margin=60)
        return RolloutAdmitted(
            run=RUN,
            step=0,
            attempt=attempt_id(Purpose.TRAIN, 0, self._made % 32, self._made),
            group=self._made % 32,
            index=self._made,
            task=self._task.name,
            digest=self._task.digest,
            budgets=budgets,
            wave=0,
            admitted=time.time(),
        )

    async def taken(self) -> None:
        await self._go.wait()

    def finished(self) -> None:
        self._left -= 1
        if not self._left:
            self._over.set()


class _Gated(runner.Runner):
    """Waits until the attempts of a round are all admitted."""

    def __init__(self, ctx: WorkerContext, shop: runner.Shop, lives: Lives, ours: Ours) -> None:
        super().__init__(ctx, shop, lives)
        self._ours = ours

    async def _take(self, delivery: runner.Delivery) -> None:
        await self._ours.taken()
        await super()._take(delivery)
        self._ours.finished()


class Theirs:
    """Harbor, in its own Python."""

    def __init__(self, python: str, task: Path) -> None:
        argv = [python, str(Path(__file__).with_name("harbor_peer.py")), str(task)]
        env = {"PATH": "/usr/bin:/bin", "HOME": str(task.parent), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def measure(self, n: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(n, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@asynccontextmanager
async def context(root: Path) -> AsyncIterator[WorkerContext]:
    nats_port, monitor, sessions = free_ports(3)
    passwords = {name: secrets.token_hex(8) for name in (nats_server.ADMIN, *nats_server.PUBLISHES)}
    text = nats_server.config_text(run=RUN, store=root / "store", port=nats_port, monitor_port=monitor, passwords=passwords)
    nats_server.write_config(root / "nats.conf", text)
    children = [
        Child("nats", nats_server.command(root / "nats.conf"), root / "nats.log"),
        Child("sessions", [sys.executable, __file__, "--sessions", str(sessions)], root / "sessions.log"),
    ]
    try:
        for child in children:
            await child.start()
        await nats_server.wait_healthy(monitor)
        address = BusAddress(url=f"nats://127.0.0.1:{nats_port}", user=nats_server.ADMIN, password=passwords[nats_server.ADMIN])
        async with Bus.connect(address, RUN, BlobStore(root / "blobs")) as bus:
            await bus.create_streams()
            yield WorkerContext(
                kind="runner",
                index=0,
                config=parse({"runners": {"slots": SLOTS}, "sandbox": {"kind": "subprocess"}}),
                dir=root,
                bus=bus,
                addresses=Addresses(nats="", sessions=(f"http://127.0.0.1:{sessions}",)),
                secrets=Secrets(admin=ADMIN),
                stop=asyncio.Event(),
                log=logging.getLogger("runner"),
            )
    finally:
        for child in children:
            await child.stop(3.0)


async def bench(given: argparse.Namespace, root: Path) -> dict[str, list[float]]:
    """CPU milliseconds of an attempt: the first ones, which stage the task or load modules, and a value a round."""
    task = write_task(root / "tasks" / "train" / "many", given.files)
    theirs = Theirs(given.harbor, task.dir) if given.harbor else None
    lease, pool = Lease(root / "sandboxes", "bench"), ThreadPoolExecutor(2 * SLOTS + 4)
    rows: dict[str, list[float]] = {"ours, first": [], "ours": [], **({"harbor, first": [], "harbor": []} if theirs else {})}
    async with context(root) as ctx, Ours(ctx.bus, ctx, task).running(lease, pool) as ours:
        for number in range(-1, given.rounds):
            first, n = (", first", 1) if number < 0 else ("", given.n)
            rows[f"ours{first}"].append(1000 * await ours.measure(n))
            if theirs:
                rows[f"harbor{first}"].append(1000 * await asyncio.to_thread(theirs.measure, max(1, n // 4)))
    if theirs:
        theirs.close()
    pool.shutdown()
    lease.release()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000, help="files of the task")
    parser.add_argument("--n", type=int, default=40, help="attempts a round (Harbor: a quarter of them)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--harbor", default="", help="a Python >= 3.12 with harbor")
    parser.add_argument("--json", action="store_true", help="one last line of JSON")
    parser.add_argument("--sessions", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sessions:
        return serve_sessions(given.sessions)
    logging.getLogger("rl360").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(bench(given, Path(folder)))
    print(f"{f'{given.files} files, CPU ms an attempt':36}{'median':>9}   each round")
    for name, values in rows.items():
        print(f"{name:36}{statistics.median(values):9.2f}   {' '.join(f'{v:.2f}' for v in values)}")
    if given.json:
        ours = statistics.median(rows["ours"])
        ratio = round(statistics.median(rows["harbor"]) / ours, 1) if given.harbor else None
        print(json.dumps({"files": given.files, "runner_cpu_ms": round(ours, 2), "harbor_vs_runner": ratio}))
    return None


if __name__ == "__main__":
    main()
