"""A task's word for a network, and which hosts an allowlist lets through. Pure.

Entries are Harbor's: a host name, "*.NAME" (names below it, not NAME itself), an IP address, a CIDR range. They have no ports.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

ALLOWLIST: Final = "allowlist"
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_NAT64: Final = ip_network("64:ff9b::/96")
PORT: Final = 3128
"""Of the proxy, on the loopback of a place in which nothing ran before it."""


@dataclass(frozen=True)
class Network:
    """`mode` is "no-network", "public", "allowlist" or "" without a word; `hosts` are the entries of an allowlist as written."""

    mode: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def filtered(self) -> bool:
        return self.mode == ALLOWLIST

    @property
    def allowed(self) -> tuple[str, ...]:
        """Its entries, normalised. Raises ValueError, but for a task that was loaded."""
        return tuple(normalised(host) for host in self.hosts)


NO_WORD: Final = Network()


def normalised(entry: str) -> str:
    """An entry of allowed_hosts as it is compared. Raises ValueError with the reason.

    >>> normalised("*.PyPI.org."), normalised("2001:db8:0::1"), normalised("192.0.2.0/24")
    ('*.pypi.org', '2001:db8::1', '192.0.2.0/24')
    """
    host = entry.strip().lower().rstrip(".")
    if "/" in host or ":" in host:
        try:
            return str(ip_network(host)) if "/" in host else str(ip_address(host))
        except ValueError:
            raise ValueError("an entry is a host name, '*.NAME', an IP address or a CIDR range, without scheme, port or path") from None
    if _is_address(host):
        return host
    if _is_address(host.removeprefix("*.")) or not all(_LABEL.fullmatch(part) for part in host.removeprefix("*.").split(".")):
        raise ValueError("it is neither a host name, '*.NAME', an IP address nor a CIDR range")
    return host


def private(entry: str) -> bool:
    """Whether a normalised entry names addresses that the proxy never opens."""
    try:
        network = ip_network(entry)
    except ValueError:
        return entry == "localhost" or entry.endswith(".localhost")
    return not public(str(network[0])) and not public(str(network[-1]))


def allows(hosts: Sequence[str], host: str) -> bool:
    """Whether normalised `hosts` have a name or address that a client asked for.

    >>> allows(["*.pypi.org"], "files.pypi.org"), allows(["*.pypi.org"], "pypi.org"), allows(["192.0.2.0/24"], "192.0.2.7")
    (True, False, True)
    """
    host = host.lower().rstrip(".")
    if _is_address(host):
        address = ip_address(host)
        return any(address in ip_network(entry) for entry in hosts if _is_network(entry))
    return any(host == entry or (entry.startswith("*.") and host.endswith(entry[1:]) and host != entry[1:]) for entry in hosts)


def public(address: str) -> bool:
    """Whether an address is one of the internet at large: not private, loopback, link-local, shared, multicast or reserved.

    One that carries an IPv4 address is as public as that.

    >>> public("8.8.8.8"), public("169.254.169.254"), public("::ffff:10.0.0.1"), public("64:ff9b::7f00:1")
    (True, False, False, False)
    """
    ip = ip_address(address.partition("%")[0])
    inner = _inner(ip) if isinstance(ip, IPv6Address) else None
    return public(str(inner)) if inner is not None else ip.is_global and not ip.is_multicast


def _inner(ip: IPv6Address) -> IPv4Address | None:
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)


def proxy_env(port: int) -> dict[str, str]:
    """What tells programs of the proxy on the loopback, in both spellings that are in use."""
    url, none = f"http://127.0.0.1:{port}", "localhost,127.0.0.1,::1"
    named = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": none}
    return {**named, **{name.lower(): value for name, value in named.items()}}


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True
