"""One connection to NATS, and JetStream's API as raw requests.

nats-py's own JetStream layer is not used: parts of it lose messages or wait for ever across a server restart
(docs/decisions.md). Here: connect without a last attempt, ask the API with a deadline and a retry.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, Final, cast

import nats
import nats.errors
from nats.aio.client import Client

from rl360.bus.address import BusAddress, BusError

log = logging.getLogger(__name__)

API_TIMEOUT: Final = 2.0  # seconds for one try
_RETRY_DELAY: Final = 0.1


class JetStreamError(BusError):
    """The server's own refusal. `full` tells a full stream from a message that is too large (both come as 10077)."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} (JetStream error {err_code})")
        self.code, self.err_code, self.description = code, err_code, description

    @property
    def full(self) -> bool:
        """The stream's own limit, or the server's storage, is used up."""
        text = self.description
        return (("maximum" in text or "resource limits" in text) and "exceeded" in text) or "insufficient storage" in text

    @property
    def transient(self) -> bool:
        return self.code == 503 and not self.full


class JournalRewound(BusError):
    """The journal lacks an event that it held: its server came back over an older copy of its store."""


async def connect(
    address: BusAddress,
    *,
    name: str,
    deadline: float = 15.0,
    on_reconnect: Callable[[], None] | None = None,
) -> Client:
    """Connect, waiting up to `deadline` seconds for the server; afterwards reconnect for ever.

    Raises BusError when no server answers in time or the credentials are refused.
    """

    async def error(e: Exception) -> None:
        log.debug("nats: %r", e)

    async def reconnected() -> None:
        log.info("nats: connected again to %s", address.url)
        if on_reconnect:
            on_reconnect()

    async def disconnected() -> None:
        log.info("nats: connection to %s lost", address.url)

    client = Client()
    try:
        async with asyncio.timeout(deadline):
            while True:
                try:
                    await client.connect(
                        servers=[address.url],
                        name=name,
                        user=address.user or None,
                        password=address.password or None,
                        allow_reconnect=True,
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=0.1,  # pyright: ignore[reportArgumentType]  (seconds, passed to asyncio.sleep)
                        connect_timeout=2,
                        ping_interval=10,
                        max_outstanding_pings=2,
                        pending_size=64 << 20,
                        error_cb=error,
                        reconnected_cb=reconnected,
                        disconnected_cb=disconnected,
                    )
                    return client
                except (nats.errors.NoServersError, OSError):
                    await asyncio.sleep(_RETRY_DELAY)
    except TimeoutError:
        raise BusError(f"no NATS server answered at {address.url} within {deadline:g} s") from None
    except nats.errors.Error as e:
        raise BusError(f"NATS at {address.url} refused the connection of {name}: {e}") from None


def reconnects(client: Client) -> int:
    """How often this client lost its server and found one again."""
    return int(client.stats["reconnects"])  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]


def is_missing(error: JetStreamError) -> bool:
    """Stream, consumer or message not found."""
    return error.code == 404


async def api(client: Client, subject: str, body: object = None, *, deadline: float = 30.0) -> dict[str, Any]:
    """One JetStream API request (`$JS.API.` is put before `subject`), retried while the server is away.

    Raises JetStreamError when the server refuses, BusError at the deadline.
    """
    payload = b"" if body is None else json.dumps(body).encode()
    try:
        async with asyncio.timeout(deadline):
            while True:
                try:
                    reply = await client.request(f"$JS.API.{subject}", payload, timeout=API_TIMEOUT)
                    data = cast(dict[str, Any], json.loads(reply.data))
                    error = data.get("error")
                    if error is None:
                        return data
                    refusal = JetStreamError(error.get("code", 0), error.get("err_code", 0), error.get("description", ""))
                    if not refusal.transient:
                        raise refusal
                except (nats.errors.TimeoutError, nats.errors.NoRespondersError, nats.errors.OutboundBufferLimitError):
                    pass
                await asyncio.sleep(_RETRY_DELAY)
    except TimeoutError:
        raise BusError(f"JetStream did not answer {subject} within {deadline:g} s") from None
