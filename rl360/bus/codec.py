"""Events to bytes and back: msgpack of the tagged union. A message is an event as it lies in the journal, a record one that is read."""

from __future__ import annotations

import msgspec

from rl360.bus import events as ev
from rl360.bus import subjects

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ev.AnyEvent] = msgspec.msgpack.Decoder(ev.AnyEvent)
_tag = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


class Recorded(msgspec.Struct, frozen=True):
    """An event as the journal holds it: `seq` counts the journal from 1, `time` is the server's clock in unix seconds."""

    seq: int
    time: float
    event: ev.AnyEvent
    traceparent: str = ""
    deliveries: int = 1


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One message of the journal, its body not yet read. `nanos` is the server's clock in unix nanoseconds."""

    seq: int
    nanos: int
    subject: str
    msg_id: str
    schema: str
    traceparent: str
    body: bytes

    @property
    def time(self) -> float:
        return self.nanos // 1000 / 1e6  # whole microseconds: exact in a float


class DeadLetter(msgspec.Struct, frozen=True):
    """A piece of work that was given up: which message, by which consumer, why."""

    stream_seq: int
    consumer: str
    kind: str
    reason: str
    deliveries: int


class EventError(ValueError):
    """Bytes that are no event of this version. `unknown_type` names the type of a newer version, when it is one."""

    def __init__(self, message: str, unknown_type: str = "") -> None:
        super().__init__(message)
        self.unknown_type = unknown_type


def encode(event: ev.Event) -> bytes:
    return _encoder.encode(event)


def decode(data: bytes, where: str = "") -> ev.AnyEvent:
    """Read an event; raises EventError naming `where` when the bytes are not one."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as e:
        kind = _type_of(data)
        if kind and kind not in ev.EVENT_TYPES:
            raise EventError(f"{where}: event type {kind!r} is unknown to this version of RL360", kind) from None
        raise EventError(f"{where}: not an event: {e}") from None


def record(message: Message, deliveries: int = 1) -> Recorded:
    """Read a message's event. Its run is the one that the subject names: a copied step belongs to the journal that it was copied into.

    Raises EventError that names the message.
    """
    event = decode(message.body, f"journal message {message.seq} ({message.subject})")
    if event.run != (run := subjects.run_of(message.subject)):
        event = msgspec.structs.replace(event, run=run)
    return Recorded(message.seq, message.time, event, message.traceparent, deliveries)


def _type_of(data: bytes) -> str:
    try:
        return msgspec.msgpack.decode(_tag.decode(data)["type"], type=str)
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
        return ""
