"""What every container of ours is made with: labels, limits, reservations, no rights that it can do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rl360.agents.sandbox.base import Limits
from rl360.agents.sandbox.docker.engine import Engine

PUBLIC: Final = "rl360-public"
"""The network of tasks that ask for a public one: containers on it don't reach each other."""

_CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""What installing packages as root needs; nothing of devices, raw sockets, namespaces or other users' processes outside."""

_OOM_SCORE: Final = 500  # a sandbox goes before its runner when the machine itself runs out of memory
_SHM_PART: Final = 8  # /dev/shm is memory: this part of the limit
_QUOTA: Final = ("storage-opt", "quota")


@dataclass(frozen=True, kw_only=True)
class Making:
    """One container. `volumes` {path inside: volume}; `empty` are those of them that must not get the image's files."""

    name: str
    image: str
    argv: Sequence[str]
    labels: Mapping[str, str]
    env: Mapping[str, str]
    cwd: str
    limits: Limits
    network: str
    volumes: Mapping[str, str]
    empty: frozenset[str] = field(default_factory=frozenset[str])
    held: bool = False  # its input is kept open by us, and it ends with it
    init: bool = False  # an init of Docker's as first process, which ends with the command


def create(engine: Engine, making: Making) -> str:
    """Make it, unstarted, and return its id; what it may write is bounded by `bounded.bound_container`. Raises what the SDK raises."""
    if making.network == PUBLIC:
        _public(engine)
    bounded = engine.quota
    try:
        return _create(engine, making, bounded)
    except engine.errors.APIError as e:
        if not bounded or not any(word in str(e).lower() for word in _QUOTA):
            raise
        engine.quota = False
        return _create(engine, making, bounded=False)


def _create(engine: Engine, making: Making, bounded: bool) -> str:
    host = engine.api.create_host_config(**_host(engine, making, bounded))
    made = engine.api.create_container(
        making.image,
        command=list(making.argv[1:]),
        entrypoint=[making.argv[0]],
        name=making.name,
        labels=dict(making.labels),
        environment={"HOME": "/root", "LANG": "C.UTF-8", **making.env},
        working_dir=making.cwd,
        hostname="sandbox",
        user="0",
        stdin_open=making.held,
        host_config=host,
    )
    return str(made["Id"])


def _host(engine: Engine, making: Making, bounded: bool) -> dict[str, Any]:
    memory, storage = making.limits.memory_mb << 20, making.limits.storage_mb << 20
    mounts = [engine.types.Mount(path, volume, type="volume", no_copy=path in making.empty) for path, volume in making.volumes.items()]
    return {
        "mem_limit": memory,
        "memswap_limit": memory,
        "mem_reservation": memory // 2,
        "nano_cpus": round(making.limits.cpus * 1e9),
        "cpu_shares": max(2, round(making.limits.cpus * 1024)),
        "pids_limit": making.limits.pids,
        "shm_size": memory // _SHM_PART,
        "network_mode": making.network,
        "mounts": mounts,
        "init": making.init,
        "cap_drop": ["ALL"],
        "cap_add": list(_CAPABILITIES),
        "security_opt": ["no-new-privileges"],
        "oom_score_adj": _OOM_SCORE,
        "ulimits": [
            engine.types.Ulimit(name="core", soft=0, hard=0),
            engine.types.Ulimit(name="fsize", soft=storage, hard=storage),  # of one file, whatever the storage driver can do
        ],
        "log_config": engine.types.LogConfig(type="none"),
        **({"storage_opt": {"size": f"{making.limits.storage_mb}M"}} if bounded else {}),
    }


def _public(engine: Engine) -> None:
    if not engine.api.networks(names=[PUBLIC]):
        engine.api.create_network(PUBLIC, driver="bridge", options={"com.docker.network.bridge.enable_icc": "false"}, check_duplicate=True)
