"""Membership: who gets traffic follows from the journal and the leases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rl360.bus import events as ev
from rl360.bus.codec import Recorded
from rl360.engines.membership import ALLOWED, Membership, State

GRACE = 5.0


class Journal:
    """Feeds a machine and keeps what it said, as the journal would."""

    def __init__(self) -> None:
        self.events: list[ev.AnyEvent] = []
        self.machine = Membership("r", grace=GRACE)

    def add(self, event: ev.AnyEvent) -> list[ev.Event]:
        self.events.append(event)
        said = list(self.machine.on(Recorded(len(self.events), 0.0, event)))
        for e in said:
            assert self.add(e) == []  # pyright: ignore[reportArgumentType]
        return said

    def join(self, *generations: str) -> None:
        for g in generations:
            self.add(ev.EngineJoined(run="r", generation=g, url=f"http://{g}"))

    def push(self, version: int, attempt: int = 1, **ok: bool | str) -> list[ev.Event]:
        """`a=True`: completed; `a=False`: failed; `a="xyz"`: says ok, with that checksum."""
        results = tuple(
            ev.PushResult(generation=g, ok=bool(how), checksum=how if isinstance(how, str) else "sum", error="" if how else "lost")
            for g, how in ok.items()
        )
        return self.add(
            ev.WeightsPushed(
                run="r",
                version=version,
                plan="p",
                path="broadcast",
                attempt=attempt,
                checksum="sum",
                results=results,
                pause_seconds=0,
                seconds=0,
            )
        )

    def states(self) -> dict[str, str]:
        return {g: m.state.value for g, m in self.machine.members.items()}

    def tick(self, now: float, *leases: str, dead: tuple[str, ...] = ()) -> list[ev.Event]:
        said = self.machine.on_tick(now, leases, dead)
        for e in said:
            self.add(e)  # pyright: ignore[reportArgumentType]
        return said


def test_case27_no_traffic_before_a_completed_push() -> None:
    j = Journal()
    j.join("a")
    assert j.machine.ready() == {} and j.machine.live() == {"a": "http://a"}
    (ready,) = j.push(0, a=True)
    assert ready == ev.EngineReady(run="r", generation="a", url="http://a", version=0, checksum="sum")
    assert j.machine.ready() == {"a": "http://a"}


def test_case27_a_joiner_gets_traffic_only_at_a_version_not_below_the_floor() -> None:
    j = Journal()
    j.join("a")
    j.push(3, a=True)
    j.join("b")
    assert j.machine.behind(3) == {"b": "http://b"} and j.machine.floor == 3
    assert j.push(2, b=True) == [] and j.states() == {"a": "ready", "b": "joined"}
    assert [type(e) for e in j.push(3, 2, b=True)] == [ev.EngineReady]
    assert j.machine.behind(3) == {} and j.machine.pushes(3) == 2
    assert j.states() == {"a": "ready", "b": "ready"}, "a catch-up push of the version that the others hold fences nobody"


def test_case31_a_checksum_that_differs_fences() -> None:
    j = Journal()
    j.join("a", "b")
    j.push(1, a=True, b="other")
    assert j.states() == {"a": "ready", "b": "fenced"}


def test_an_engine_that_failed_or_missed_a_push_is_fenced_and_the_rest_go_on() -> None:
    j = Journal()
    j.join("a", "b", "c")
    j.push(1, a=True, b=True, c=True)
    said = j.push(2, a=True, b=False)
    assert [(type(e).__name__, e.generation, e.cause) for e in said if isinstance(e, ev.EngineFenced)] == [
        ("EngineFenced", "b", "push of version 2: lost"),
        ("EngineFenced", "c", "missed the push of version 2"),
    ]
    assert j.machine.ready() == {"a": "http://a"} and j.machine.floor == 2


def test_a_joiner_absent_from_a_push_under_way_is_not_fenced() -> None:
    j = Journal()
    j.join("a")
    j.push(1, a=True)
    j.join("b")
    j.push(2, a=True)
    assert j.states() == {"a": "ready", "b": "joined"}


def test_a_push_that_nobody_completed_raises_no_floor() -> None:
    j = Journal()
    j.join("a")
    j.push(4, a=False)
    assert (j.machine.floor, j.machine.pushes(4)) == (-1, 1)


def test_case28_an_engine_whose_lease_is_gone_is_lost_after_the_grace() -> None:
    j = Journal()
    j.join("a", "b")
    j.push(0, a=True, b=True)
    assert j.tick(100.0, "a", "b") == []
    assert [j.tick(t, "a") for t in (101.0, 103.0, 106.0)] == [[], [], []]
    (lost,) = j.tick(106.5, "a")
    assert isinstance(lost, ev.EngineLost) and lost.generation == "b" and "5.5 s" in lost.cause
    assert j.machine.ready() == {"a": "http://a"}
    assert j.tick(107.0, "a") == []


def test_a_lease_that_comes_back_in_time_starts_the_grace_anew() -> None:
    j = Journal()
    j.join("a")
    for now, leases in ((0.0, ()), (4.0, ()), (5.0, ("a",)), (6.0, ()), (10.0, ())):
        assert j.tick(now, *leases) == []


def test_a_process_that_is_gone_is_lost_at_once() -> None:
    j = Journal()
    j.join("a")
    (lost,) = j.tick(0.0, "a", dead=("a",))
    assert isinstance(lost, ev.EngineLost) and lost.cause == "its process is gone"


def test_leases_missing_after_an_outage_of_the_watch_are_not_held_against_engines() -> None:
    """The bus was away for a minute, and the leases ran out meanwhile: engines get the grace to renew them."""
    j = Journal()
    j.join("a")
    j.tick(0.0, "a")
    j.tick(1.0)
    assert j.tick(61.0) == [] and j.tick(65.0) == []
    assert j.tick(66.0, "a") == [] and j.states() == {"a": "joined"}


def test_a_generation_at_the_address_of_an_older_one_takes_its_place() -> None:
    """After a resume a port may be in use again: the old generation's readiness must not open the new one to traffic."""
    j = Journal()
    j.join("a")
    j.push(0, a=True)
    (lost,) = j.add(ev.EngineJoined(run="r", generation="b", url="http://a"))
    assert isinstance(lost, ev.EngineLost) and lost.generation == "a"
    assert j.machine.ready() == {} and j.machine.live() == {"b": "http://a"}


def test_lost_and_fenced_are_final() -> None:
    j = Journal()
    j.join("a", "b")
    j.tick(0.0, "b", dead=("a",))
    j.push(1, b=False)
    assert j.push(2, a=True, b=True) == [] and j.states() == {"a": "lost", "b": "fenced"}
    j.join("a")
    assert j.states()["a"] == "lost"
    assert j.machine.counts() == {State.JOINED: 0, State.READY: 0, State.LOST: 1, State.FENCED: 1}


generation = st.sampled_from("abc")
actions = st.one_of(
    st.tuples(st.just("join"), generation),
    st.tuples(st.just("push"), st.dictionaries(generation, st.sampled_from([True, False, "other"]))),
    st.tuples(st.just("again"), st.dictionaries(generation, st.booleans())),
    st.tuples(st.just("tick"), st.sets(generation)),
)


@given(st.lists(actions, max_size=25))
def test_a_restarted_membership_folds_the_journal_to_the_same_state_and_says_nothing_new(made: list[tuple[str, object]]) -> None:
    j = Journal()
    version, attempt, now = 0, 1, 0.0
    for kind, what in made:
        before = {g: m.state for g, m in j.machine.members.items()}
        match kind:
            case "join":
                j.join(str(what))
            case "push":
                version, attempt = version + 1, 1
                j.push(version, **what)  # pyright: ignore[reportCallIssue]
            case "again":
                attempt += 1
                j.push(version, attempt, **what)  # pyright: ignore[reportCallIssue]
            case _:
                now += 4.0
                j.tick(now, *what)  # pyright: ignore[reportGeneralTypeIssues]
        for g, state in before.items():
            after = j.machine.members[g].state
            assert after is state or after in ALLOWED[state] or State.LOST in ALLOWED[after]
    again = Membership("r", grace=GRACE)
    said = [e for i, event in enumerate(j.events) for e in again.on(Recorded(i + 1, 0.0, event))]
    assert all(e in j.events for e in said)
    assert (again.ready(), again.live(), again.floor) == (j.machine.ready(), j.machine.live(), j.machine.floor)
    assert all(m.version >= 0 for m in again.members.values() if m.state is State.READY)
