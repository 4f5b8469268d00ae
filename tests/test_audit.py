"""`rl360 audit`: a right run is clean, and every kind of corruption is found, under the rule that it breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from rl360.audit import Finding, audit, notes
from rl360.bus import events as ev
from rl360.bus import sample as wire
from rl360.bus import selection
from rl360.bus.blobs import BlobStore, digest_of
from rl360.bus.codec import DeadLetter, Recorded, decode, encode
from rl360.bus.payload import Payload
from rl360.journal.source import Reading
from tests.trainer.world import RUN, World, config_of


def behaviour(a: ev.RolloutAdmitted, rng: object) -> float | ev.Cause:
    """Kept groups, a dropped one, failures."""
    if a.index == 3:
        return ev.Cause.LOST
    return 1.0 if a.group == 2 else float(a.index % 2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    config = config_of(reward={"format_error_penalty": 0.3}, trainer={"loss_reduction": "sample_mean"})
    played = World(config, tmp_path_factory.mktemp("world"), seed=5, behaviour=behaviour)
    played.play()
    return played


Edit = Callable[[list[ev.Event], BlobStore], Sequence[DeadLetter] | None]
"""Changes events, and may say which dead letters there are."""


def findings(world: World, edit: Edit) -> list[Finding]:
    """Of the world's journal with one corruption, numbered anew so that only the corruption itself shows."""
    events: list[ev.Event] = [r.event for r in world.journal.records]
    letters = edit(events, world.blobs) or ()
    records = [Recorded(i, float(i), decode(encode(e))) for i, e in enumerate(events, start=1)]
    return audit(Reading(records, dead_letters=letters), world.blobs)


def where(events: Sequence[ev.Event], kind: type[ev.Event], **fields: object) -> int:
    return next(i for i, e in enumerate(events) if isinstance(e, kind) and all(getattr(e, k) == v for k, v in fields.items()))


def change(kind: type[ev.Event], select: dict[str, object], **new: object) -> Edit:
    """Set fields of the first event of a kind that matches; a callable gets the old value."""

    def edit(events: list[ev.Event], _: BlobStore) -> None:
        i = where(events, kind, **select)
        values = {k: v(getattr(events[i], k)) if callable(v) else v for k, v in new.items()}
        events[i] = msgspec.structs.replace(events[i], **values)

    return edit


def drop(kind: type[ev.Event], **select: object) -> Edit:
    return lambda events, _: events.pop(where(events, kind, **select)) and None


def repeat(kind: type[ev.Event], select: dict[str, object], **new: object) -> Edit:
    """Append a changed copy at the journal's end."""

    def edit(events: list[ev.Event], _: BlobStore) -> None:
        events.append(msgspec.structs.replace(events[where(events, kind, **select)], **new))

    return edit


def resample(select: dict[str, object] | None = None, attempt: str = "", **arrays: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Change arrays (or the name) inside a merged sample, by default the first one."""

    def edit(events: list[ev.Event], blobs: BlobStore) -> None:
        i = where(events, ev.TrajectoryMerged, **(select or KEPT))
        old = wire.decode(blobs.unpack(events[i].sample))
        values = {name: getattr(old, name).copy() for name in ("ids", "mask", "logprobs", "versions")}
        for name, new in arrays.items():
            values[name] = new(values[name])
        payload = blobs.pack(wire.encode(wire.make(attempt=attempt or old.attempt, branch=old.branch, **values)))
        events[i] = msgspec.structs.replace(events[i], sample=payload)

    return edit


def train_twice(events: list[ev.Event], blobs: BlobStore) -> None:
    """Mark the first turn's tokens as sampled in the second branch as well."""
    i = where(events, ev.TrajectoryMerged, branch=1)
    turn = events[where(events, ev.TurnCompleted, session=events[i].session, turn=1)]
    shared = (turn.prompt_ids.size + turn.output_ids.size) // 4
    main = wire.decode(blobs.unpack(events[where(events, ev.TrajectoryMerged, session=events[i].session, branch=0)].sample))

    def as_in_main(name: str) -> Callable[[np.ndarray], np.ndarray]:
        return lambda array: np.concatenate([getattr(main, name)[:shared], array[shared:]])

    resample({"session": events[i].session, "branch": 1}, **{n: as_in_main(n) for n in ("mask", "logprobs", "versions")})(events, blobs)


def first(value: object) -> Callable[[np.ndarray], np.ndarray]:
    """Put a value in the first sampled place."""

    def edit(array: np.ndarray) -> np.ndarray:
        place = int(np.argmax(array != (-1 if array.dtype == np.int32 else 0)))
        array[place] = value
        return array

    return edit


def place(i: int, value: object) -> Callable[[np.ndarray], np.ndarray]:
    def edit(array: np.ndarray) -> np.ndarray:
        array[i] = value
        return array

    return edit


def unmask(array: np.ndarray) -> np.ndarray:
    array[-1] = 0
    return array


def attempts(**new: object) -> Callable[[tuple[ev.AttemptDecision, ...]], tuple[ev.AttemptDecision, ...]]:
    return lambda old: (msgspec.structs.replace(old[0], **new), *old[1:])


def payload(new: Callable[[np.ndarray], np.ndarray], kind: str) -> Callable[[Payload], Payload]:
    """Change an array that a turn carries."""

    def edit(old: Payload) -> Payload:
        data = new(np.frombuffer(old.inline or b"", kind).copy()).tobytes()
        return Payload(size=len(data), inline=data)

    return edit


def letter(seq: int) -> DeadLetter:
    return DeadLetter(stream_seq=seq, consumer="runner", kind="max_deliver", reason="delivered too often", deliveries=3)


def given_up(events: list[ev.Event], _: BlobStore) -> list[DeadLetter]:
    """An attempt that was given up, without the failure that says so."""
    events.pop(where(events, ev.InfraFailed, attempt="t0-g000-a3"))
    return [letter(1 + where(events, ev.RolloutAdmitted, attempt="t0-g000-a3"))]


def resumed_otherwise(events: list[ev.Event], _: BlobStore) -> None:
    old = events[0]
    config = {**old.config, "run": {**old.config["run"], "seed": 99}}
    digest = digest_of(json.dumps(config, sort_keys=True).encode())
    events.append(msgspec.structs.replace(old, resumed=1, config=config, config_digest=digest))


A0, A1 = "t0-g000-a0", "t0-g000-a1"
FIRST_TURN = {"session": f"{A0}.1", "turn": 1}
KEPT = {"step": 0, "group": 0}
TRAINED = {"step": 1}

CORRUPTIONS: dict[str, tuple[Edit, str, str]] = {
    "an attempt without outcome": (drop(ev.InfraFailed, attempt="t0-g000-a3"), "S16", "no terminal outcome"),
    "an outcome nobody requested": (
        repeat(ev.VerifierResult, {"attempt": A0}, attempt="t0-g000-a9", session="t0-g000-a9.1"),
        "S16",
        "nobody requested",
    ),
    "a late outcome that is not late": (
        lambda e, _: e.append(ev.LateOutcome(run=RUN, step=0, attempt=A0, group=0, session=f"{A0}.2", kind="InfraFailed", first_seq=1)),
        "S16",
        "not its first outcome",
    ),
    "a reward that is not finite": (change(ev.VerifierResult, {"attempt": A0}, reward=float("nan")), "S12", "not a finite number"),
    "a reward outside its range": (change(ev.VerifierResult, {"attempt": A0}, reward=2.0), "S12", "not a finite number"),
    "a receipt without digest": (
        change(ev.VerifierResult, {"attempt": A0}, receipt=lambda r: msgspec.structs.replace(r, file_digest="")),
        "S12",
        "does not say which file",
    ),
    "a reward written while the agent lived": (
        change(ev.VerifierResult, {"attempt": A0}, receipt=lambda r: msgspec.structs.replace(r, agent_dead_at=9.0)),
        "S12",
        "before the agent was dead",
    ),
    "a reward changed after the decision": (change(ev.VerifierResult, {"attempt": A0}, reward=0.5), "S18", "baseline"),
    "another baseline by one bit": (change(ev.GroupDecided, KEPT, baseline=lambda b: float(np.nextafter(b, 1))), "S18", "baseline"),
    "another advantage": (change(ev.GroupDecided, KEPT, attempts=attempts(advantage=0.9)), "S18", "advantage 0.9"),
    "another fate": (change(ev.GroupDecided, KEPT, attempts=attempts(fate=ev.Fate.MASKED)), "S18", "fate"),
    "a group kept although all pass": (
        change(ev.GroupDecided, {"step": 0, "group": 2}, kept=True, reason=""),
        "S18",
        "kept True, not False",
    ),
    "a group never decided": (drop(ev.GroupDecided, step=0, group=2), "S21", "1 of its groups were undecided"),
    "a group decided too early": (
        lambda e, _: e.insert(where(e, ev.RolloutAdmitted), e.pop(where(e, ev.GroupDecided, **KEPT))),
        "S18",
        "before everything it depends on was known",
    ),
    "a group that no step opened": (repeat(ev.GroupDecided, KEPT, group=77), "S18", "no step opened with it"),
    "a group decided twice, differently": (repeat(ev.GroupDecided, KEPT, baseline=0.0), "journal", "twice, with different contents"),
    "format errors counted otherwise": (
        change(ev.TrajectoryMerged, {"attempt": "t0-g000-a1", "branch": 0}, format_errors=1),
        "S18",
        "baseline",
    ),
    "a step closed with other counts": (change(ev.StepClosed, {"step": 0, "purpose": ev.Purpose.TRAIN}, infra=0), "S23", "infra 0, not"),
    "a sample trained twice in a step": (
        change(ev.StepTrained, TRAINED, sample_digests=lambda d: (*d, d[0]), samples=lambda n: n + 1),
        "S21",
        "2 times on one sample",
    ),
    "a sample trained again in a later step": (
        lambda e, _: change(ev.StepTrained, TRAINED, sample_digests=e[where(e, ev.StepTrained, step=0)].sample_digests)(e, _),
        "S21",
        "of step 0 again",
    ),
    "a survivor left out": (
        change(ev.StepTrained, TRAINED, sample_digests=lambda d: d[1:], samples=lambda n: n - 1),
        "S21",
        "which survived",
    ),
    "a sample from nowhere": (change(ev.StepTrained, TRAINED, sample_digests=lambda d: ("0" * 64, *d[1:])), "S21", "did not survive"),
    "a count that is not the list's": (change(ev.StepTrained, TRAINED, samples=99), "S21", "says 99 samples"),
    "another divisor": (change(ev.StepTrained, TRAINED, divisor=lambda d: d + 1), "S20", "divided by"),
    "a step skipped with survivors": (change(ev.StepTrained, TRAINED, skipped=True), "S21", "skipped with"),
    "a step trained twice": (repeat(ev.StepTrained, TRAINED, loss=1.0), "journal", "twice, with different contents"),
    "a step trained before the one before it": (drop(ev.StepTrained, step=0), "S21", "trained before step 0"),
    "a version that jumps": (change(ev.StepTrained, TRAINED, version=9), "S24", "leaves version 9, not 2"),
    "a version that nobody made": (change(ev.WeightsPushed, {"version": 3}, version=8), "S24", "no step made it"),
    "an older version pushed": (repeat(ev.WeightsPushed, {"version": 1}, attempt=2), "S24", "pushed after version 3"),
    "tokens older than the bound": (change(ev.TrajectoryMerged, {"step": 2, "group": 0, "branch": 0}, min_version=0), "S18", "stale"),
    "a sampled token replaced": (resample(ids=first(77)), "S1", "token 0 is 77"),
    "a log-prob replaced": (resample(logprobs=first(-9.0)), "S6", "not those of its turns"),
    "a version replaced": (resample(versions=first(5)), "S24", "did not exist yet"),
    "a sampled token masked": (
        resample(mask=unmask, logprobs=unmask, versions=lambda a: np.append(a[:-1], -1).astype(np.int32)),
        "S6",
        "sampled tokens train in no branch",
    ),
    "a token that trains in two branches": (train_twice, "S6", "train in another branch as well"),
    "a prompt token marked as sampled": (
        resample(mask=place(0, 1), logprobs=place(0, -1.0), versions=place(0, 0)),
        "S6",
        "did not sample is marked",
    ),
    "a sample whose tokens are older than the bound": (
        resample({"step": 2, "group": 0, "branch": 0}, versions=first(0)),
        "S24",
        "a token of version 0 trained on version 2, bound 1",
    ),
    "a sample of another attempt": (resample(attempt="t9-g009-a9"), "S6", "holds the sample of t9-g009-a9"),
    "a token more than its turns": (change(ev.TrajectoryMerged, KEPT, tokens=lambda n: n + 1), "S8", "and says"),
    "a turn that is missing": (drop(ev.TurnCompleted, session=f"{A0}.1", turn=1), "S8", "turn 1 is not in the journal"),
    "fewer sampled tokens said than marked": (change(ev.TrajectoryMerged, KEPT, sampled=lambda n: n - 1), "S6", "are said to be"),
    "a reward that trains and that no verifier wrote": (drop(ev.VerifierResult, attempt=A1), "S12", "its verifier wrote none"),
    "a reward that trains and is not the verifier's": (
        change(ev.GroupDecided, KEPT, attempts=attempts(raw_reward=0.5)),
        "S12",
        "trains on reward 0.5; its verifier wrote 0.0",
    ),
    "more tokens trained than sampled": (change(ev.StepTrained, TRAINED, tokens=lambda n: n + 1), "S21", "says that it trained on"),
    "a turn with a log-prob too few": (
        change(ev.TurnCompleted, FIRST_TURN, logprobs=payload(lambda a: a[:-1], "<f4")),
        "S8",
        "log-probs for",
    ),
    "a log-prob that is no number": (
        change(ev.TurnCompleted, FIRST_TURN, logprobs=payload(place(0, np.nan), "<f4")),
        "S8",
        "log-probs for",
    ),
    "a token with two versions": (
        change(ev.TurnCompleted, FIRST_TURN, spans=lambda spans: (*spans, ev.VersionSpan(1, 0, spans[0].end))),
        "S8",
        "name them twice",
    ),
    "a token without a version": (
        change(ev.TurnCompleted, FIRST_TURN, spans=lambda spans: (ev.VersionSpan(0, 0, spans[0].end - 1),)),
        "S8",
        "version spans end at token",
    ),
    "a turn's sampled token replaced": (
        change(ev.TurnCompleted, FIRST_TURN, output_ids=payload(place(0, 99), "<i4")),
        "S1",
        "its turn says 99",
    ),
    "another oldest version said": (change(ev.TrajectoryMerged, KEPT, min_version=-1), "S6", "min_version -1, not 0"),
    "cached tokens counted otherwise": (change(ev.TrajectoryMerged, KEPT, cached_tokens=77), "S6", "cached_tokens 77, not"),
    "a push that an engine missed": (change(ev.WeightsPushed, {"version": 1}, results=()), "S24", "neither fenced nor lost"),
    "a push that failed on an engine": (
        change(ev.WeightsPushed, {"version": 1}, results=lambda r: (msgspec.structs.replace(r[0], ok=False, error="gone"),)),
        "S24",
        "push of version 1: gone, and it was neither fenced nor lost",
    ),
    "a push with another checksum": (
        change(ev.WeightsPushed, {"version": 1}, results=lambda r: (msgspec.structs.replace(r[0], checksum="y"),)),
        "S24",
        "its checksum is not the trainer's, and it was neither fenced nor lost",
    ),
    "traffic without a push": (change(ev.EngineReady, {}, version=5), "S24", "which no push completed on it"),
    "a dead letter that no outcome explains": (given_up, "dead letter", "no outcome says so"),
    "a dead letter of no attempt": (lambda e, _: [letter(1 + where(e, ev.StepOpened))], "dead letter", "asks for no attempt"),
    "a recipe that was changed": (
        change(ev.RunStarted, {}, config=lambda c: {**c, "run": {**c["run"], "seed": 99}}),
        "journal",
        "digest names",
    ),
    "a run resumed with another recipe": (resumed_otherwise, "journal", "resumed with another recipe: run.seed is not what it was"),
    "a journal without its beginning": (drop(ev.RunStarted), "journal", "not with RunStarted"),
    "a recipe that can't be read": (change(ev.RunStarted, {}, config={"nonsense": 1}), "journal", "can't be read"),
}


def test_a_run_as_it_should_be_is_clean(world: World):
    assert findings(world, lambda events, _: None) == []
    assert any(e.branches == 2 for e in world.journal.of(ev.TrajectoryMerged)), "the world has branches to check"
    assert world.journal.of(ev.LateOutcome), "and late outcomes"


def test_a_run_that_a_newer_release_resumed_is_clean(world: World):
    """The older recipe lacks a key, whose default the newer one says."""

    def resumed(events: list[ev.Event], _: BlobStore) -> None:
        newer = events[0]
        config = {**newer.config, "push": {k: v for k, v in newer.config["push"].items() if k != "every"}}
        digest = digest_of(json.dumps(config, sort_keys=True).encode())
        events[0] = msgspec.structs.replace(newer, config=config, config_digest=digest)
        events.append(msgspec.structs.replace(newer, resumed=1))

    assert findings(world, resumed) == []


@pytest.mark.parametrize("schedule", ["sync", "one_step"])
def test_both_schedules_are_clean_with_workers_killed_and_failures(schedule: str, tmp_path: Path):
    for seed in range(3):
        played = World(config_of(run={"schedule": schedule}), tmp_path / str(seed), seed=seed, kills=2)
        assert audit(Reading(played.play().records), played.blobs) == []


def test_a_run_that_is_still_going_is_clean(world: World):
    records = world.journal.records
    assert all(audit(Reading(records[:n]), world.blobs) == [] for n in range(0, len(records), 97))


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_a_corruption_is_found_under_its_rule(world: World, what: str):
    edit, rule, text = CORRUPTIONS[what]
    found = findings(world, edit)
    assert any(f.rule == rule and text in f.text for f in found), "\n".join(map(str, found)) or "clean"


def test_a_dead_letter_with_an_outcome_is_explained(world: World):
    def edit(events: list[ev.Event], _: BlobStore) -> list[DeadLetter]:
        return [letter(1 + where(events, ev.RolloutAdmitted, attempt=a)) for a in ("t0-g000-a3", A0)]

    assert findings(world, edit) == []


def fenced(events: list[ev.Event], blobs: BlobStore) -> None:
    change(ev.WeightsPushed, {"version": 1}, results=())(events, blobs)
    events.append(ev.EngineFenced(run=RUN, generation="engine0-1", cause="missed the push of version 1"))


def test_a_push_that_an_engine_missed_is_right_once_it_is_fenced(world: World):
    assert findings(world, fenced) == []


def test_an_event_of_a_newer_version_is_skipped_and_said_and_no_gap(world: World):
    *records, last = world.journal.records
    records.append(msgspec.structs.replace(last, seq=last.seq + 1))
    journal = Reading(records, unknown={last.seq: "NewEvent"})
    assert audit(journal, world.blobs) == []
    assert list(notes(journal)) == ["1 events of type NewEvent, which this version of RL360 doesn't know, were skipped"]
    assert [f.rule for f in audit(Reading(records), world.blobs)] == ["journal"], "without it there is a gap"


def test_a_message_that_can_not_be_read_is_found(world: World):
    records = [r for r in world.journal.records if r.seq != len(world.journal.records)]
    found = audit(Reading(records, malformed={len(records) + 1: "not an event"}), world.blobs)
    assert [(f.rule, f.seq) for f in found] == [("journal", len(records) + 1)]


def part_of(world: World, step: int, edit: Edit = lambda events, _: None) -> list[Finding]:
    """Of what one step needs of the world's journal, with one corruption."""
    parts = {p.step: p for p in selection.parts({step})}
    chosen = [r for r in world.journal.records if r.event.step in parts and parts[r.event.step].has(type(r.event).__name__)]
    events = [r.event for r in chosen]
    edit(events, world.blobs)
    records = [Recorded(r.seq, r.time, e) for r, e in zip(chosen, events, strict=True)]
    return audit(Reading(records, steps=frozenset({step})), world.blobs)


@pytest.mark.parametrize("step", range(3))
def test_what_one_step_needs_is_enough_to_audit_it(world: World, step: int):
    assert part_of(world, step) == []
    for edit, rule in (
        (change(ev.StepTrained, {"step": step}, divisor=lambda d: d + 1), "S20"),
        (change(ev.StepTrained, {"step": step}, version=9), "S24"),
        (change(ev.GroupDecided, {"step": step, "kept": True}, baseline=0.1), "S18"),
        (resample({"step": step, "group": 0}, ids=first(77)), "S1"),
    ):
        assert rule in {f.rule for f in part_of(world, step, edit)}


def test_a_gap_in_the_journal_is_found(world: World):
    records = [r for r in world.journal.records if r.seq != 5]
    assert audit(Reading(records), world.blobs)[0].text == "event 6 follows event 4: the journal is not whole"


def test_a_damaged_and_a_missing_blob_are_found(tmp_path: Path):
    played = World(config_of(run={"steps": 1}, tasks={"eval_every": 0}), tmp_path, behaviour=behaviour)
    records = played.play().records
    i = where([r.event for r in records], ev.TrajectoryMerged, **KEPT)
    digest = played.blobs.put(played.blobs.unpack(records[i].event.sample))
    moved = msgspec.structs.replace(records[i].event.sample, inline=None, digest=digest)
    records[i] = msgspec.structs.replace(records[i], event=msgspec.structs.replace(records[i].event, sample=moved))
    assert audit(Reading(records), played.blobs) == []
    path = played.blobs.path(digest)
    path.write_bytes(b"x")
    assert any(f.rule == "blob" and "damaged" in f.text for f in audit(Reading(records), played.blobs))
    path.unlink()
    assert any(f.rule == "blob" and "missing" in f.text for f in audit(Reading(records), played.blobs))


def test_blobs_that_retention_removed_are_not_missed_and_it_is_said(tmp_path: Path):
    with patch("rl360.bus.blobs.INLINE_LIMIT", 100):
        played = World(config_of(), tmp_path, behaviour=behaviour)
        played.play()
    gone, kept = ({e.sample.digest for e in played.journal.of(ev.TrajectoryMerged) if e.step == s} - {""} for s in (0, 1))
    for digest in gone:
        played.blobs.remove(digest)
    assert {f.rule for f in audit(Reading(played.journal.records), played.blobs)} >= {"blob"}
    about = {"first": 0, "last": 1, "kept": (1,), "blobs": len(gone), "blob_bytes": 1, "checkpoints": (), "checkpoint_bytes": 0}
    played.journal.publish(ev.BlobsPruned(run=RUN, **about))
    journal = Reading(played.journal.records)
    assert audit(journal, played.blobs) == []
    assert list(notes(journal)) == [f"pruned by retention: {len(gone)} blobs of steps 0 to 1 but 1; the tokens in them were not checked"]
    played.blobs.remove(kept.pop())
    assert "blob" in {f.rule for f in audit(journal, played.blobs)}, "a pinned step's blob is missed"


def test_a_finding_reads_well_and_goes_into_json():
    finding = Finding(rule="S16", about=A0, text="has no terminal outcome", seq=4)
    assert str(finding) == f"S16 {A0}: has no terminal outcome (event 4)"
    assert finding.as_dict() == {"rule": "S16", "about": A0, "text": "has no terminal outcome", "seq": 4}
