"""The streams of a run: the journal (the record), its dead letters, and the leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from nats.aio.client import Client

from rl360.bus import subjects
from rl360.bus.codec import DeadLetter
from rl360.bus.connection import JetStreamError, api, is_missing

DEDUPE_WINDOW: Final = 600.0  # seconds in which a copy of an event is dropped by the server
_IN_USE: Final = 10058


async def create_streams(client: Client, run: str, *, replicas: int = 1, sources: Sequence[Mapping[str, Any]] = ()) -> None:
    """Create what is missing; leaves what is there. Raises JetStreamError when a stream has another shape.

    `sources`: other streams that the server copies into the journal, until `stop_copying`.
    """
    name = subjects.stream(run)
    journal = {**_journal(run, replicas), "sources": list(sources)}
    dead: dict[str, Any] = {
        "name": subjects.dead_letter_stream(run),
        "subjects": [f"$JS.EVENT.ADVISORY.CONSUMER.{kind}.{name}.>" for kind in ("MAX_DELIVERIES", "MSG_TERMINATED")],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
    }
    leases: dict[str, Any] = {
        "name": subjects.lease_stream(run),
        "subjects": [subjects.lease_subject(run, ">")],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
        "max_msgs_per_subject": 1,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "allow_rollup_hdrs": True,
        "discard": "new",
    }
    for config in (journal, dead, leases):
        try:
            await api(client, f"STREAM.CREATE.{config['name']}", config)
        except JetStreamError as e:
            if e.err_code != _IN_USE:
                raise


def _journal(run: str, replicas: int) -> dict[str, Any]:
    return {
        "name": subjects.stream(run),
        "subjects": [f"rl360.{run}.ev.>"],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
        "deny_delete": True,
        "duplicate_window": int(DEDUPE_WINDOW * 1e9),
        "discard": "new",
        "allow_direct": True,
    }


async def stop_copying(client: Client, run: str, *, replicas: int = 1) -> None:
    """From now on the journal holds what is published to it and nothing else."""
    await api(client, f"STREAM.UPDATE.{subjects.stream(run)}", _journal(run, replicas))


async def last_seq(client: Client, stream: str) -> int:
    """Sequence of the newest message of a stream (0: none)."""
    info = await api(client, f"STREAM.INFO.{stream}")
    return int(info["state"]["last_seq"])


async def dead_letters(client: Client, run: str) -> list[DeadLetter]:
    """All dead letters of a run."""
    stream = subjects.dead_letter_stream(run)
    letters: list[DeadLetter] = []
    for seq in range(1, await last_seq(client, stream) + 1):
        try:
            reply = await api(client, f"STREAM.MSG.GET.{stream}", {"seq": seq})
        except JetStreamError as e:
            if is_missing(e):
                continue
            raise
        letters.append(_letter(reply["message"]["data"]))
    return letters


class _Advisory(msgspec.Struct):
    type: str = ""
    consumer: str = ""
    stream_seq: int = 0
    deliveries: int = 0
    reason: str = ""


def _letter(data_base64: str) -> DeadLetter:
    raw = msgspec.convert(data_base64, bytes)  # JSON carries bytes as base64
    a = msgspec.json.decode(raw, type=_Advisory)
    kind = a.type.rsplit(".", 1)[-1]
    return DeadLetter(a.stream_seq, a.consumer, kind, a.reason or "delivered too often", a.deliveries)
