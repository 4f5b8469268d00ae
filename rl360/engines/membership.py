"""Which engine generations may get traffic: a fold over the journal, plus a clock for leases. Pure.

joined -> ready -> lost | fenced. An engine gets traffic only after a push that it completed, at a version not below the
floor and with the trainer's checksum (CASES 27, 31). A generation that missed a push is fenced, one whose lease ran out
is lost; both for good: the engine comes back as a new generation, and nobody waits for the old one's goodbye.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rl360.bus import events as ev
from rl360.bus.codec import Recorded


class State(StrEnum):
    JOINED = "joined"  # up, with weights of its own: no traffic
    READY = "ready"
    LOST = "lost"
    FENCED = "fenced"


ALLOWED: Final[dict[State, frozenset[State]]] = {
    State.JOINED: frozenset({State.READY, State.LOST, State.FENCED}),
    State.READY: frozenset({State.LOST, State.FENCED}),
    State.LOST: frozenset(),
    State.FENCED: frozenset(),
}

FOLDS: Final = (ev.EngineJoined, ev.WeightsPushed, ev.EngineReady, ev.EngineLost, ev.EngineFenced)
"""Events that the machine folds; its own are among them."""


@dataclass
class Member:
    generation: str
    url: str
    pid: int
    node: str
    state: State = State.JOINED
    version: int = -1  # newest version that a push completed; -1: none
    absent_since: float | None = None

    @property
    def live(self) -> bool:
        return bool(ALLOWED[self.state])


class Membership:
    """Fold `FOLDS` with `on`; call `on_tick` with the leases that are held now.

    Also the trainer's view of whom to push to: `live`, `behind`, `pushes`.
    """

    def __init__(self, run: str, *, grace: float) -> None:
        """`grace`: seconds that a lease may be missing before its engine counts as lost."""
        self.run, self.grace = run, grace
        self.members: dict[str, Member] = {}
        self.floor = -1  # highest version that any engine completed; -1: none yet
        self._pushes: Counter[int] = Counter()
        self._last_tick: float | None = None

    # ------------------------------------------------------------------------------------------------ views

    def urls(self, *states: State) -> dict[str, str]:
        """URL by generation of the members in these states."""
        return {m.generation: m.url for m in self.members.values() if m.state in states}

    def ready(self) -> dict[str, str]:
        """Who gets traffic."""
        return self.urls(State.READY)

    def live(self) -> dict[str, str]:
        """Who takes part in the next push."""
        return self.urls(State.JOINED, State.READY)

    def behind(self, version: int) -> dict[str, str]:
        """Live members that don't hold `version`: they need a catch-up push."""
        return {g: url for g, url in self.live().items() if self.members[g].version != version}

    def pushes(self, version: int) -> int:
        """How many pushes of `version` the journal holds; the next one is this plus 1 (`WeightsPushed.attempt`)."""
        return self._pushes[version]

    def counts(self) -> dict[State, int]:
        """Members by state: for the minimum of healthy engines and for the display."""
        found = Counter(m.state for m in self.members.values())
        return {state: found[state] for state in State}

    # ------------------------------------------------------------------------------------------------ fold

    def on(self, recorded: Recorded) -> Sequence[ev.Event]:
        match recorded.event:
            case ev.EngineJoined() as e:
                return self._joined(e)
            case ev.WeightsPushed() as e:
                return self._pushed(e)
            case ev.EngineReady() as e:
                if self._move(e.generation, State.READY):
                    self.members[e.generation].version = e.version
            case ev.EngineLost() as e:
                self._move(e.generation, State.LOST)
            case ev.EngineFenced() as e:
                self._move(e.generation, State.FENCED)
            case _:
                pass
        return ()

    def _joined(self, e: ev.EngineJoined) -> list[ev.Event]:
        if e.generation in self.members:
            return []
        displaced = [m for m in self.members.values() if m.live and m.url == e.url]
        self.members[e.generation] = Member(e.generation, e.url, e.pid, e.node)
        return [lost for m in displaced for lost in self._lose(m, f"its address belongs to {e.generation} now")]

    def _pushed(self, push: ev.WeightsPushed) -> list[ev.Event]:
        self._pushes[push.version] += 1
        if any(_completed(r, push) for r in push.results):
            self.floor = max(self.floor, push.version)
        decided: list[ev.Event] = []
        for result in push.results:
            decided += self._result(push, result)
        present = {r.generation for r in push.results}
        for member in self.members.values():
            if member.state is State.READY and member.generation not in present and member.version < push.version:
                decided += self._fence(member.generation, f"missed the push of version {push.version}")
        return decided

    def _result(self, push: ev.WeightsPushed, result: ev.PushResult) -> list[ev.Event]:
        member = self.members.get(result.generation)
        if member is None or not member.live:
            return []
        if not _completed(result, push):
            why = result.error or "its checksum is not the trainer's"
            return self._fence(result.generation, f"push of version {push.version}: {why}")
        if push.version < self.floor:
            return []  # holds an old version: no traffic before a newer one
        member.version = push.version
        if not self._move(result.generation, State.READY):
            return []
        return [ev.EngineReady(run=self.run, generation=result.generation, url=member.url, version=push.version, checksum=result.checksum)]

    def _fence(self, generation: str, cause: str) -> list[ev.Event]:
        moved = self._move(generation, State.FENCED)
        return [ev.EngineFenced(run=self.run, generation=generation, cause=cause)] if moved else []

    def _move(self, generation: str, state: State) -> bool:
        """Change a member's state where that is allowed; say whether it changed."""
        member = self.members.get(generation)
        if member is None or state not in ALLOWED[member.state]:
            return False
        member.state = state
        return True

    # ------------------------------------------------------------------------------------------------ clock

    def on_tick(self, now: float, leases: Collection[str], dead: Collection[str] = ()) -> list[ev.Event]:
        """`leases`: generations that hold one at `now` (unix seconds); `dead`: generations whose process is known to be gone.

        The grace counts from when the lease was first seen missing, and only while somebody looks: after a pause of the
        looking itself (this worker or the bus was away) it starts again.
        """
        away = self._last_tick is None or now - self._last_tick > self.grace
        self._last_tick = now
        decided: list[ev.Event] = []
        for member in self.members.values():
            if not member.live:
                continue
            if member.generation in leases and member.generation not in dead:
                member.absent_since = None
                continue
            if member.absent_since is None or away:
                member.absent_since = now
            if member.generation in dead:
                decided += self._lose(member, "its process is gone")
            elif now - member.absent_since > self.grace:
                decided += self._lose(member, f"no lease for {now - member.absent_since:.1f} s")
        return decided

    def _lose(self, member: Member, cause: str) -> list[ev.Event]:
        self._move(member.generation, State.LOST)
        return [ev.EngineLost(run=self.run, generation=member.generation, cause=cause)]


def _completed(result: ev.PushResult, push: ev.WeightsPushed) -> bool:
    return result.ok and result.checksum == push.checksum
