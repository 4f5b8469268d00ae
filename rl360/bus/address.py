"""Where a run's services are. Imports no client: who starts a server for itself can load one meanwhile."""

from __future__ import annotations

import msgspec

from rl360.errors import InputError


class BusAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bus is and who connects."""

    url: str
    user: str = ""
    password: str = ""


class BusError(InputError):
    """The bus did not do what was asked within its deadline, or refused it."""


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run's services listen; the same over restarts."""

    nats: str
    nats_monitor_port: int = 0
    gateway: str = ""  # http URL
    gateway_metrics_port: int = 0
    sessions: tuple[str, ...] = ()  # http URLs


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """`admin` opens sessions; a session's own key is derived from it. `nats` holds a password for each worker kind."""

    admin: str
    nats: dict[str, str] = {}
