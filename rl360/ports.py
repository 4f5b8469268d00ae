"""Ports that are free now."""

from __future__ import annotations

import socket


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports of `host`: they are taken at once, or the same one could come twice."""
    held = [socket.socket() for _ in range(count)]
    try:
        for s in held:
            s.bind((host, 0))
        return [int(s.getsockname()[1]) for s in held]
    finally:
        for s in held:
            s.close()
