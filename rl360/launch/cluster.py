"""A run whose processes others start: its folder laid out for them, and the two servers that aren't workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from rl360.bus import nats_server
from rl360.config import ConfigError, load
from rl360.launch import prepare, servers
from rl360.launch.rundir import Hosts, RunDir

_EVERYWHERE = "0.0.0.0"


def init(recipe: Path, overrides: tuple[str, ...], path: Path, hosts: Hosts) -> None:
    """Lay the folder out; the lead brings the tasks. A run that is there already is left as it is.

    Raises ConfigError, also when the run there has another recipe.
    """
    config = load(recipe, overrides)
    prepare.policy(config)
    prepare.sources(config)
    prepare.agent(config)
    folder = RunDir(path)
    if not folder.exists:
        folder.create(prepare.upcycle(config, path), hosts)
    elif folder.config.run.name != config.run.name:
        raise ConfigError(f"{path} holds run {folder.config.run.name!r}, not {config.run.name!r}: choose another --dir")
    servers.nats_config(folder, _EVERYWHERE)
    print(f"run {folder.config.run.name} is laid out in {path}")


def serve(name: str, path: Path) -> NoReturn:
    """Become nats-server or the gateway of the run in `path`. Raises ConfigError or BusError when there is no such run or binary."""
    folder = RunDir(path)
    _ = folder.config  # a folder that holds no run is refused here
    is_nats = name == "nats"
    command = nats_server.command(servers.nats_config_path(folder)) if is_nats else servers.gateway_command(folder, _EVERYWHERE)
    os.execv(command[0], command)
