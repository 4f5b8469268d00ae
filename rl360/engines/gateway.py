"""SMG, the gateway in front of the engines: its command line and the part of its worker API that membership uses.

Membership alone decides who gets traffic: SMG's own health checks, load polling, retries and circuit breaker are off.
A health check would evict a paused engine; a retry would parse and re-serialise bodies, and send a request again that
an engine may already be serving. The session server retries instead, under the same request id.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Sequence
from typing import Final

import aiohttp
import msgspec

from rl360.bus.events import Boundary, Cause
from rl360.engines.client import Endpoint, EngineError

ROUTING_KEY: Final = "X-SMG-Routing-Key"
"""Requests with the same value go to the same engine as long as it is registered."""

_NEVER: Final = 10**9  # seconds
_POLL: Final = 0.05


def command(host: str, port: int, prometheus_port: int, *, request_timeout: float) -> list[str]:
    """Command line of SMG. A request may take `request_timeout` seconds. It listens on both ports."""
    options = {
        "--host": host,
        "--port": port,
        "--prometheus-host": host,
        "--prometheus-port": prometheus_port,
        "--policy": "manual",
        "--assignment-mode": "min_load",
        "--request-timeout-secs": max(1, round(request_timeout)),
        # a failed connection must not shut an engine out for good: with the probes off nothing would let it in again
        "--worker-stall-secs": _NEVER,
        "--worker-wedge-secs": _NEVER,
        "--worker-startup-timeout-secs": 30,
        "--worker-startup-check-interval": 1,
        "--shutdown-grace-period-secs": 1,
        "--history-backend": "none",
        "--log-level": "warn",
    }
    flags = ("--disable-retries", "--disable-circuit-breaker", "--disable-health-check", "--disable-load-monitoring")
    settings = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "smg.launch_router", *settings, *flags, "--disable-tokenizer-autoload"]


async def wait_ready(url: str, deadline: float) -> None:
    """Wait until the gateway at `url` answers. Raises EngineError after `deadline` seconds."""
    async with aiohttp.ClientSession() as http:
        endpoint = Endpoint(http, url, boundary=Boundary.GATEWAY, timeout=2.0)
        end = asyncio.get_running_loop().time() + deadline
        while True:
            try:
                await endpoint.call("GET", "/health", bytes)
                return
            except EngineError as e:
                if asyncio.get_running_loop().time() > end:
                    raise EngineError(Boundary.GATEWAY, Cause.START_FAILED, f"not up within {deadline:g} s: {e.detail}") from None
            await asyncio.sleep(_POLL)


class Worker(msgspec.Struct, frozen=True):
    """An engine as SMG lists it. `status`: ready, or draining after a removal (for about 5 s; it gets nothing new)."""

    id: str
    url: str
    status: str


class _Workers(msgspec.Struct, frozen=True):
    workers: list[Worker]


class GatewayClient(Endpoint):
    """SMG's worker API. All calls raise EngineError (boundary gateway)."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, timeout: float) -> None:
        super().__init__(http, url, boundary=Boundary.GATEWAY, timeout=timeout)

    async def workers(self) -> list[Worker]:
        return (await self.call("GET", "/workers", _Workers)).workers

    async def add(self, url: str) -> None:
        """Ask for a registration. SMG does it behind: it probes the engine, then lists it. Asking again is harmless."""
        try:
            await self.call("POST", "/workers", bytes, {"url": url})
        except EngineError as e:
            if e.status != 409:  # registered, being registered, or draining
                raise

    async def remove(self, worker: str) -> None:
        """Send no new request to a worker; those in flight may end. Removing what is gone is harmless."""
        try:
            await self.call("DELETE", f"/workers/{worker}", bytes)
        except EngineError as e:
            if e.status != 404:
                raise


def corrections(wanted: Collection[str], listed: Sequence[Worker]) -> tuple[list[str], list[str]]:
    """What makes SMG's list agree with the URLs that should get traffic: (URLs to add, worker ids to remove).

    >>> corrections({"http://b"}, [Worker("1", "http://a", "ready"), Worker("2", "http://c", "draining")])
    (['http://b'], ['1'])
    """
    known = {w.url for w in listed}
    add = sorted(url for url in wanted if url not in known)
    remove = [w.id for w in listed if w.url not in wanted and w.status != "draining"]
    return add, remove
