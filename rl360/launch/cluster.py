"""A run whose processes others start: its folder laid out for them, and the two servers that aren't workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from rl360.bus import nats_server
from rl360.config import ConfigError, load
from rl360.engines import gateway
from rl360.launch import prepare
from rl360.launch.rundir import Hosts, RunDir, port_of

_EVERYWHERE = "0.0.0.0"


def init(recipe: Path, overrides: tuple[str, ...], path: Path, hosts: Hosts) -> None:
    """Lay the folder out; the lead brings the tasks. A run that is there already is left as it is.

    Raises ConfigError, also when the run there has another recipe.
    """
    config = load(recipe, overrides)
    prepare.policy(config)
    prepare.sources(config)
    folder = RunDir(path)
    if not folder.exists:
        folder.create(prepare.upcycle(config, path), hosts)
    elif folder.config.run.name != config.run.name:
        raise ConfigError(f"{path} holds run {folder.config.run.name!r}, not {config.run.name!r}: choose another --dir")
    write_nats_config(folder)
    print(f"run {folder.config.run.name} is laid out in {path}")


def write_nats_config(folder: RunDir) -> None:
    """nats-server's configuration, with the users and what each may publish."""
    addresses, nats = folder.addresses, folder.path / "nats"
    text = nats_server.config_text(
        run=folder.config.run.name,
        store=nats / "store",
        port=port_of(addresses.nats),
        monitor_port=addresses.nats_monitor_port,
        passwords=folder.secrets.nats,
        listen=_EVERYWHERE,
    )
    nats_server.write_config(nats / "server.conf", text)


def serve(name: str, path: Path) -> NoReturn:
    """Become nats-server or the gateway of the run in `path`. Raises ConfigError or BusError when there is no such run or binary."""
    folder = RunDir(path)
    config, addresses = folder.config, folder.addresses
    if name == "nats":
        command = nats_server.command(path / "nats" / "server.conf")
    else:
        command = gateway.command(
            _EVERYWHERE, port_of(addresses.gateway), addresses.gateway_metrics_port, request_timeout=config.engine.request_timeout
        )
    os.execv(command[0], command)
