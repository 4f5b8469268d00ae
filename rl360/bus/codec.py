"""Events to bytes and back: msgpack of the tagged union."""

from __future__ import annotations

import msgspec

from rl360.bus import events as ev

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


def _type_of(data: bytes) -> str:
    try:
        return msgspec.msgpack.decode(_tag.decode(data)["type"], type=str)
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
        return ""
