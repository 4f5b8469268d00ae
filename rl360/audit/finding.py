"""What an audit finds, and what a check is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from rl360.bus.codec import Recorded


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A broken rule. `seq`: event of the journal where it shows; 0: something that should be there is not."""

    rule: str  # S16, …
    about: str  # attempt, group or step
    text: str
    seq: int = 0

    def __str__(self) -> str:
        at = f" (event {self.seq})" if self.seq else ""
        return f"{self.rule} {self.about}: {self.text}{at}"

    def as_dict(self) -> dict[str, str | int]:
        return {"rule": self.rule, "about": self.about, "text": self.text, "seq": self.seq}


class Check(Protocol):
    """Folds the journal; says what is wrong as soon as it shows, and at the end what is missing."""

    def on(self, recorded: Recorded) -> Iterable[Finding]: ...

    def end(self) -> Iterable[Finding]: ...
