"""One event as one line: for people, or as JSON. Bytes are told by their size, never shown. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

import msgspec

from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.codec import EventError, Message, record
from rl360.journal.listing import amount
from rl360.journal.source import JournalError

_TEXT: Final = 60  # characters of a text that are shown
_SHOWN_ELSEWHERE: Final = {"run", "step", "type", "attempt", "group", "session"}
_PAYLOAD: Final = ({"size", "inline"}, {"size", "digest"})


_ATTEMPT: Final = re.compile(r"[te](\d+)-g(\d+)-a\d+", re.ASCII)


@dataclass(frozen=True)
class Filter:
    """Which messages to show. Empty: all."""

    types: Collection[str] = ()
    step: int | None = None
    attempt: str = ""

    def patterns(self, run: str) -> list[str]:
        """Subject filters that let through what is shown, and as little else as they can. Raises JournalError for a bad attempt name."""
        step, group = None if self.step is None else subjects.step_token(self.step), subjects.ANY
        if self.attempt:
            found = _ATTEMPT.fullmatch(self.attempt)
            if found is None:
                raise JournalError(f"no attempt is called {self.attempt!r}: names look like t3-g004-a1")
            step, group = step or str(int(found[1])), f"{int(found[2]):03d}"
        return [subjects.pattern(run, step=step or subjects.ANY, type_=t, group=group) for t in self.types or (subjects.ANY,)]

    def shows(self, message: Message) -> bool:
        name = subjects.parse(message.subject)
        if (self.types and name.type not in self.types) or (self.step is not None and name.step != self.step):
            return False
        return not self.attempt or content(message).get("attempt") == self.attempt


def content(message: Message) -> dict[str, Any]:
    """The event as plain data; what can't be read has the one key `unreadable`. A type of a newer version is read as it is."""
    try:
        return cast(dict[str, Any], msgspec.to_builtins(record(message).event, builtin_types=(bytes,)))
    except EventError as e:
        try:
            data = msgspec.msgpack.decode(message.body) if e.unknown_type else None
        except msgspec.MsgspecError:
            data = None
        return cast(dict[str, Any], data) if isinstance(data, dict) else {"unreadable": str(e)}


def line(message: Message) -> str:
    """Sequence, time of day, type, whom it is about, and its fields."""
    name, fields = subjects.parse(message.subject), content(message)
    clock = datetime.fromtimestamp(message.time).strftime("%H:%M:%S.%f")[:-3]
    step = "-" if name.step < 0 else str(name.step)
    who = fields.get("session") or fields.get("attempt") or ("" if name.group is None else f"g{name.group:03d}")
    told = " ".join(f"{k}={_short(v)}" for k, v in fields.items() if k not in _SHOWN_ELSEWHERE)
    new = "" if name.type in ev.EVENT_TYPES else " (not known to this version)"
    return f"{message.seq:>8} {clock} {step:>4} {name.type:<17} {who:<16} {told}{new}".rstrip()


def json_line(message: Message) -> str:
    """The event as JSON with `seq` and `time` (unix seconds)."""
    return json.dumps({"seq": message.seq, "time": message.time, **_plain(content(message))})


def _short(value: Any) -> str:
    """A field in a few characters."""
    if (size := _bytes_of(value)) is not None:
        return f"<{amount(size)}>"
    if isinstance(value, dict):
        return f"{{{len(cast(dict[str, Any], value))}}}"
    if isinstance(value, list | tuple):
        return f"[{len(cast(list[Any], value))}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = json.dumps(value) if isinstance(value, str) and (" " in value or not value) else str(value)
    return text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."


def _plain(value: Any) -> Any:
    """Without bytes: their size stands for them."""
    if isinstance(value, bytes):
        return {"size": len(value)}
    if isinstance(value, dict):
        found = cast(dict[str, Any], value)
        if found.keys() in _PAYLOAD:
            return {k: v for k, v in found.items() if k != "inline"}
        return {k: _plain(v) for k, v in found.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in cast(list[Any], value)]
    return value


def _bytes_of(value: Any) -> int | None:
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, dict) and (found := cast(dict[str, Any], value)).keys() in _PAYLOAD:
        return int(found["size"])
    return None
