"""The two servers of a run that aren't workers: what each is started with, whoever starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rl360.bus import nats_server
from rl360.engines import gateway
from rl360.launch.rundir import RunDir, port_of

LOCAL: Final = "127.0.0.1"


def nats_config(folder: RunDir, listen: str = LOCAL) -> Path:
    """Write nats-server's configuration, with the users and what each may publish; its path."""
    addresses, nats = folder.addresses, folder.path / "nats"
    text = nats_server.config_text(
        run=folder.config.run.name,
        store=nats / "store",
        port=port_of(addresses.nats),
        monitor_port=addresses.nats_monitor_port,
        passwords=folder.secrets.nats,
        listen=listen,
    )
    path = nats_config_path(folder)
    nats_server.write_config(path, text)
    return path


def nats_config_path(folder: RunDir) -> Path:
    return folder.path / "nats" / "server.conf"


def gateway_command(folder: RunDir, listen: str = LOCAL) -> list[str]:
    """Command line of the gateway."""
    addresses, timeout = folder.addresses, folder.config.engine.request_timeout
    return gateway.command(listen, port_of(addresses.gateway), addresses.gateway_metrics_port, request_timeout=timeout)
