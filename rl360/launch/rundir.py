"""A run's folder: where everything of a run is kept, and how it is created and opened again.

recipe.json      the whole config, defaults included      addresses.json  where its services listen
secrets.json     keys and passwords (0600)                 children.json   processes started, by recorded id
nats/ blobs/ checkpoints/ sandboxes/ tasks/ logs/         ranks/: where a trainer's ranks meet   alive/: signs of life
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from rl360.bus import nats_server
from rl360.bus.address import Addresses, Secrets
from rl360.config import Config, ConfigError
from rl360.journal.archive import is_archive
from rl360.ports import free_ports

FOLDERS: Final = ("nats", "blobs", "checkpoints", "sandboxes", "tasks", "logs")
T = TypeVar("T")
_NATS, _MONITOR, _GATEWAY, _GATEWAY_METRICS, _SESSION = 4222, 8222, 30000, 29000, 8080  # in a cluster


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """Names under which a cluster's services reach each other. `session`: "{}" in it stands for the server's index."""

    nats: str
    gateway: str
    session: str


class RunDir:
    """Paths and stored settings of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        return (self.path / "recipe.json").exists()

    def create(self, config: Config, hosts: Hosts | None = None) -> None:
        """Lay the folder out; `hosts`: of a cluster (None: all is on this machine). Raises ConfigError when it holds a run already."""
        if self.exists:
            raise ConfigError(f"{self.path} holds a run already: continue it with --resume {self.path}, or choose another --dir")
        for name in FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)
        users = (nats_server.ADMIN, *nats_server.PUBLISHES)
        keys = Secrets(admin=secrets.token_urlsafe(32), nats={u: secrets.token_urlsafe(16) for u in users})
        _write(self.path / "secrets.json", keys, 0o600)
        if hosts is None:
            self._choose_addresses(config)
        else:
            _write(self.path / "addresses.json", cluster_addresses(hosts, config.sessions.count), 0o644)
        _write(self.path / "recipe.json", config, 0o644)  # last: a folder with it is whole

    def _choose_addresses(self, config: Config) -> None:
        ports = free_ports(4 + config.sessions.count)
        addresses = Addresses(
            nats=f"nats://127.0.0.1:{ports[0]}",
            nats_monitor_port=ports[1],
            gateway=f"http://127.0.0.1:{ports[2]}",
            gateway_metrics_port=ports[3],
            sessions=tuple(f"http://127.0.0.1:{p}" for p in ports[4:]),
        )
        _write(self.path / "addresses.json", addresses, 0o644)

    def renew_addresses(self) -> bool:
        """Choose new addresses when somebody else listens on one of the run's. Only for who runs the run: nothing of it may be up."""
        known = self.addresses
        ports = [known.nats_monitor_port, known.gateway_metrics_port, *map(port_of, (known.nats, known.gateway, *known.sessions))]
        taken = not all(map(_is_free, ports))
        if taken:
            self._choose_addresses(self.config)
        return taken

    @property
    def config(self) -> Config:
        return _read(self.path / "recipe.json", Config)

    @property
    def addresses(self) -> Addresses:
        """Raises ConfigError for a folder that can only be read."""
        if is_archive(self.path):
            raise ConfigError(f"{self.path} is an imported archive: it can be read, not run")
        return _read(self.path / "addresses.json", Addresses)

    @property
    def children(self) -> dict[str, int]:
        """Process ids of its children, as recorded last; empty when none are, or while they are being written."""
        try:
            return json.loads((self.path / "children.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def processes(self) -> list[str]:
        """Command lines of other processes that mention the folder, whoever started them."""
        mention = re.compile(re.escape(str(self.path)) + r"(?![\w.-])")
        found: list[str] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):  # it ended, or is another user's
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if mention.search(command):
                        found.append(command)
        return found

    @property
    def secrets(self) -> Secrets:
        return _read(self.path / "secrets.json", Secrets)


def cluster_addresses(hosts: Hosts, sessions: int) -> Addresses:
    """Each service has its own host, and the same port everywhere. Raises ConfigError when session servers would share one."""
    names = [hosts.session.replace("{}", str(i)) for i in range(sessions)]
    if len(set(names)) < sessions:
        raise ConfigError(f'{sessions} session servers (sessions.count) need as many names: --session-host "{hosts.session}-{{}}"')
    return Addresses(
        nats=f"nats://{hosts.nats}:{_NATS}",
        nats_monitor_port=_MONITOR,
        gateway=f"http://{hosts.gateway}:{_GATEWAY}",
        gateway_metrics_port=_GATEWAY_METRICS,
        sessions=tuple(f"http://{name}:{_SESSION}" for name in names),
    )


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that lingers is nobody
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def new_path(root: Path, name: str) -> Path:
    """A folder for a new run: `root/name`, or `root/name-2`, `-3`, …"""
    path, n = root / name, 1
    while path.exists():
        n += 1
        path = root / f"{name}-{n}"
    return path


def under_way(root: Path, besides: Path) -> list[Path]:
    """Folders of other runs in `root` whose processes live."""
    others = [RunDir(p) for p in sorted(root.iterdir()) if p.is_dir() and p.resolve() != besides.resolve()]
    return [f.path for f in others if f.children and f.processes()]


def _write(path: Path, value: msgspec.Struct, mode: int) -> None:
    aside = path.with_name(path.name + ".tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as f:
        f.write(msgspec.json.format(msgspec.json.encode(value), indent=1))
    os.replace(aside, path)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} is missing: {path.parent} is not the folder of a run") from None
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{path} is damaged: {e}") from None
