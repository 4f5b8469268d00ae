"""Dead letters: work that was given up belongs to an attempt whose outcome says so, or that another delivery ended (CASES 37)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rl360.audit.finding import Finding
from rl360.bus import events as ev
from rl360.bus.codec import DeadLetter, Recorded


class LetterCheck:
    """`unread`: messages of the journal that are no event of this version; giving those up is right."""

    def __init__(self, letters: Sequence[DeadLetter], unread: Mapping[int, str]) -> None:
        self._letters = {letter.stream_seq: letter for letter in letters if letter.stream_seq not in unread}
        self._given_up: dict[int, ev.RolloutAdmitted] = {}
        self._over: set[str] = set()
        self._closed: set[tuple[ev.Purpose, int]] = set()

    def on(self, recorded: Recorded) -> Iterable[Finding]:
        match recorded.event:
            case ev.RolloutAdmitted() as admitted if recorded.seq in self._letters:
                self._given_up[recorded.seq] = admitted
            case ev.VerifierResult() | ev.InfraFailed() as outcome:
                self._over.add(outcome.attempt)
            case ev.StepClosed() as closed:
                self._closed.add((closed.purpose, closed.step))
            case _:
                pass
        return ()

    def end(self) -> Iterable[Finding]:
        """While its step is open, an attempt's outcome may still come."""
        for seq, letter in self._letters.items():
            admitted = self._given_up.get(seq)
            why = f"given up by {letter.consumer} after {letter.deliveries} deliveries ({letter.reason})"
            if admitted is None:
                yield Finding(rule="dead letter", about=f"event {seq}", text=f"{why}, but it asks for no attempt", seq=seq)
            elif admitted.attempt not in self._over and (admitted.purpose, admitted.step) in self._closed:
                yield Finding(rule="dead letter", about=admitted.attempt, text=f"{why}, and no outcome says so", seq=seq)
