"""Leases: short-lived keys that say who is alive. A lease that is not renewed is removed by the server.

Read by direct get and by listing, never by watching: nats-py's watch loses messages under load (docs/decisions.md).
"""

from __future__ import annotations

import math
from typing import Any

import nats.errors
from nats.aio.client import Client

from rl360.bus import subjects
from rl360.bus.connection import JetStreamError, api
from rl360.bus.publisher import Publisher

_WRONG_SEQUENCE = 10071


class Leases:
    """The lease bucket of a run. Keys are subject tokens joined by dots ("engine.engine0-17c3")."""

    def __init__(self, client: Client, publisher: Publisher, run: str) -> None:
        self._client, self._publisher, self._run = client, publisher, run

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        """Write or renew a lease for `ttl` seconds (whole seconds, at least 1)."""
        await self._write(key, value, ttl, {})

    async def acquire(self, key: str, value: bytes, ttl: float) -> bool:
        """Write the lease only when nobody holds it."""
        try:
            await self._write(key, value, ttl, {"Nats-Expected-Last-Subject-Sequence": "0"})
        except JetStreamError as e:
            if e.err_code == _WRONG_SEQUENCE:
                return False
            raise
        return True

    async def _write(self, key: str, value: bytes, ttl: float, headers: dict[str, str]) -> None:
        headers["Nats-TTL"] = f"{max(1, math.ceil(ttl))}s"
        await (await self._publisher.submit(subjects.lease_subject(self._run, key), value, headers))

    async def get(self, key: str) -> bytes | None:
        """Value of a live lease, or None."""
        subject = f"$JS.API.DIRECT.GET.{subjects.lease_stream(self._run)}.{subjects.lease_subject(self._run, key)}"
        try:
            reply = await self._client.request(subject, b"", timeout=2.0)
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError) as e:
            raise nats.errors.TimeoutError from e
        if reply.headers and reply.headers.get("Status"):
            return None
        return reply.data

    async def keys(self) -> set[str]:
        """Keys of all live leases."""
        prefix = subjects.lease_subject(self._run, "")
        info: dict[str, Any] = await api(
            self._client, f"STREAM.INFO.{subjects.lease_stream(self._run)}", {"subjects_filter": prefix + ">"}, deadline=10.0
        )
        found: dict[str, int] = info["state"].get("subjects") or {}
        return {subject.removeprefix(prefix) for subject in found}

    async def delete(self, key: str) -> None:
        """Give a lease up."""
        body = {"filter": subjects.lease_subject(self._run, key)}
        await api(self._client, f"STREAM.PURGE.{subjects.lease_stream(self._run)}", body, deadline=5.0)
