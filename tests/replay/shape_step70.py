"""Make tests/fixtures/step70: the outage step of a real run of recipes/step70.toml, shaped to the numbers of the published step 70.

    rl360 run recipes/step70.toml --dir RUN
    python -m tests.replay.shape_step70 RUN tests/fixtures/step70

Conversations, tokens, log-probs, failures and receipts are the run's. Attempts are dealt out anew so that 7 groups are kept with 56
samples, 23 of them lost, and 25 groups passed every attempt that was not lost; the rewards of kept groups average 0.75. Everything that
follows from that is made again: samples, decisions, the optimizer step on the run's own checkpoint, the step's counts. Then steps and
versions are renumbered to 70.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from rl360.bus import events as ev
from rl360.bus import sample as wire
from rl360.bus import subjects, tracing
from rl360.bus.blobs import BlobStore, digest_of
from rl360.bus.codec import DeadLetter, Message, Recorded, encode
from rl360.bus.payload import Payload
from rl360.config import parse
from rl360.journal import exporting, importing
from rl360.journal.source import Source
from rl360.launch.journal_files import open_source
from rl360.replay.decide import decide_step
from rl360.replay.facts import StepFacts, facts_of
from rl360.replay.rules import ReplayRules
from rl360.trainer import checkpoints, step_events
from rl360.trainer.commands import Restore
from rl360.trainer.distributed import process_groups
from rl360.trainer.group_filter import attempts_of
from rl360.trainer.ledger import command
from rl360.trainer.rank import Rank

STEP: Final = 70
OUTAGE: Final = 5  # the step of recipes/step70.toml that its faults strike
SHIFT: Final = STEP - OUTAGE
FIVE: Final = (1.0, 1.0, 1.0, 0.75, 0.0)
FOUR: Final = (1.0, 1.0, 1.0, 0.0)
KEPT: Final = (FIVE,) * 5 + (FOUR,) * 2
PASSED: Final = (1.0,) * 4
SIZE: Final = 8

Event = Any


@dataclass(frozen=True)
class Slot:
    """A shaped attempt and the recorded one that it is made from."""

    attempt: str
    group: int
    index: int
    source: str
    reward: float | None


def deal(facts: StepFacts) -> Iterator[Slot]:
    """Which recorded attempt stands where: verified ones without a format error, and failures, each in order."""
    names = [a for spec in facts.opened.groups for a in attempts_of(facts.opened, spec)]
    outcomes = [o for o in map(facts.outcomes.complete, names) if o is not None]
    clean = iter([o.attempt for o in outcomes if o.sampled and not any(m.format_errors for m in o.merged)])
    failed = [o.attempt for o in outcomes if isinstance(o.terminal, ev.InfraFailed)]
    lost = iter(failed * 2)
    for spec in facts.opened.groups:
        rewards = KEPT[spec.group] if spec.group < len(KEPT) else PASSED
        shaped = [*rewards, *[None] * (SIZE - len(rewards))]
        for index, reward in enumerate(shaped[spec.group % SIZE :] + shaped[: spec.group % SIZE]):
            attempt = ev.attempt_id(ev.Purpose.TRAIN, OUTAGE, spec.group, index)
            yield Slot(attempt, spec.group, index, next(lost) if reward is None else next(clean), reward)


class Shaper:
    """The recorded events of the outage step as events of the shaped attempts."""

    def __init__(self, records: list[Recorded], blobs: BlobStore) -> None:
        self._records, self._blobs = records, blobs
        self.slots = list(deal(facts_of(records, OUTAGE)))
        self._by_source: dict[str, list[Slot]] = {}
        for slot in self.slots:
            self._by_source.setdefault(slot.source, []).append(slot)

    def events(self) -> list[Recorded]:
        """In the order of the original; what is decided about the step is left out."""
        made: list[Recorded] = []
        for record in self._records:
            event = record.event
            if isinstance(event, ev.StepTrained | ev.GroupDecided | ev.StepClosed | ev.WeightsPushed) and event.step == OUTAGE:
                continue
            if event.step != OUTAGE or isinstance(event, ev.StepOpened):
                made.append(record)
            elif isinstance(event, ev.RolloutRequested | ev.RolloutAdmitted):
                made.append(record)  # what was asked for stays as it was
            elif isinstance(event, ev.FaultInjected):
                continue  # it names attempts by what they were
            else:
                made += (self._renamed(record, slot) for slot in self._by_source.get(getattr(event, "attempt", ""), ()))
        return made

    def _renamed(self, record: Recorded, slot: Slot) -> Recorded:
        event: Event = record.event
        session = ev.session_id(slot.attempt, int(event.session.rpartition(".")[2]))
        changes: dict[str, Any] = {"attempt": slot.attempt, "group": slot.group, "session": session}
        if isinstance(event, ev.VerifierResult):
            changes["reward"] = slot.reward
        if isinstance(event, ev.TurnCompleted):
            changes["request_id"] = f"{session}-{event.turn}"
        if isinstance(event, ev.TrajectoryMerged):
            changes["sample"] = self._sample(event.sample, attempt=slot.attempt)
        return msgspec.structs.replace(record, event=msgspec.structs.replace(event, **changes))

    def _sample(self, payload: Payload, **changes: Any) -> Payload:
        data = wire.encode(msgspec.structs.replace(wire.decode(self._blobs.unpack(payload)), **changes))
        return Payload(size=len(data), inline=data)


def decided(records: list[Recorded], trained: list[ev.StepTrained | ev.WeightsPushed]) -> list[Recorded]:
    """With groups decided, the step trained, pushed and closed."""
    facts = facts_of(records, OUTAGE)
    decision = decide_step(facts, ReplayRules.of(facts.config))
    last = records[-1]
    out = list(records)
    for event in (*decision.groups, *trained):
        facts.tally.add(event)
        out.append(Recorded(0, last.time, event))
    out.append(Recorded(0, last.time, facts.tally.closed()))
    return out


def train(records: list[Recorded], run: Path) -> ev.StepTrained:
    """The optimizer step on the shaped samples, from the run's checkpoint before the outage."""
    facts = facts_of(records, OUTAGE)
    batch = decide_step(facts, ReplayRules.of(facts.config)).batch
    found = checkpoints.of_version(run / checkpoints.FOLDER, batch.version)
    assert found is not None, f"{run} has no checkpoint of version {batch.version}"
    with process_groups():
        rank = Rank(facts.config, run)
        rank.perform(Restore(str(found.path)))
        answer = rank.perform(command(batch, dp=1, microbatch_tokens=facts.config.trainer.microbatch_tokens))
    measured = step_events.Measured(answer.loss, answer.grad_norm, answer.metrics, answer.seconds)
    alarm = facts.config.trainer.logp_alarm
    return step_events.trained(facts.run, batch, measured, checkpoint=checkpoints.name_of(STEP), alarm_above=alarm)


# ---------------------------------------------------------------------------------------------------- renumber


class Renumber:
    """Steps and versions of the outage become those of step 70."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._digests: dict[str, str] = {}  # of samples: before -> after

    def record(self, record: Recorded) -> Recorded:
        event: Event = record.event
        changes: dict[str, Any] = {"step": event.step + SHIFT} if event.step >= 0 else {}
        for name in ("attempt", "session"):
            if isinstance(value := getattr(event, name, None), str):  # a push counts its attempts
                changes[name] = _name(value)
        for name in ("version", "min_version", "max_version"):
            if (value := getattr(event, name, None)) is not None:
                changes[name] = value + SHIFT
        match event:
            case ev.RunStarted():
                changes |= self._config(event)
            case ev.TurnCompleted():
                changes["spans"] = tuple(ev.VersionSpan(s.version + SHIFT, s.start, s.end) for s in event.spans)
                changes["request_id"] = f"{_name(event.session)}-{event.turn}"
            case ev.TrajectoryMerged():
                changes["sample"] = self._sample(event.sample)
            case ev.GroupDecided():
                changes["attempts"] = tuple(msgspec.structs.replace(a, attempt=_name(a.attempt)) for a in event.attempts)
            case ev.StepTrained():
                changes["sample_digests"] = tuple(self._digests.get(d, d) for d in event.sample_digests)
                changes["checkpoint"] = checkpoints.name_of(event.step + SHIFT)
            case _:
                pass
        return msgspec.structs.replace(record, event=msgspec.structs.replace(event, **changes))

    def _config(self, event: ev.RunStarted) -> dict[str, Any]:
        config = event.config | {"faults": [{**f, "step": f["step"] + SHIFT} for f in event.config["faults"]]}
        config = config | {"run": {**config["run"], "steps": 100}}
        parse(config)
        return {"config": config, "config_digest": digest_of(json.dumps(config, sort_keys=True).encode())}

    def _sample(self, payload: Payload) -> Payload:
        before = self._blobs.unpack(payload)
        sample = wire.decode(before)
        versions = sample.versions + SHIFT * (sample.mask != 0).astype(sample.versions.dtype)
        made = wire.make(
            attempt=_name(sample.attempt),
            branch=sample.branch,
            ids=sample.ids,
            mask=sample.mask,
            logprobs=sample.logprobs,
            versions=versions,
        )
        data = wire.encode(made)
        self._digests[digest_of(before)] = digest_of(data)
        return Payload(size=len(data), inline=data)


def _name(name: str) -> str:
    kind, rest = name[0], name[1:]
    step, dash, tail = rest.partition("-")
    return f"{kind}{int(step) + SHIFT}{dash}{tail}"


# ---------------------------------------------------------------------------------------------------- write


class Shaped(Source):
    """Messages that were never in a server."""

    def __init__(self, run: str, blobs: BlobStore, records: list[Recorded]) -> None:
        super().__init__(run, blobs, frozenset({STEP}))
        self._records = records

    async def messages(self, steps: Collection[int] | None = None) -> AsyncIterator[Message]:
        for seq, record in enumerate(self._records, 1):
            event = record.event
            nanos = int(record.time * 1e6) * 1000
            about = subjects.subject(event), subjects.msg_id(event), str(ev.SCHEMA_VERSION), tracing.traceparent_of(event)
            yield Message(seq, nanos, *about, encode(event))

    async def dead_letters(self) -> list[DeadLetter]:
        return []


async def recorded(run: Path) -> list[Recorded]:
    async with open_source(run) as source:
        return await source.records([OUTAGE])


def main(run: Path, out: Path) -> None:
    blobs = BlobStore(run / "blobs")
    records = asyncio.run(recorded(run))
    shaped = Shaper(records, blobs).events()
    pushes = [r.event for r in records if isinstance(r.event, ev.WeightsPushed) and r.event.step == OUTAGE]
    whole = decided(shaped, [train(shaped, run), *pushes])
    renumber = Renumber(blobs)
    final = [renumber.record(r) for r in whole]
    started = next(r.event for r in final if isinstance(r.event, ev.RunStarted))
    source = Shaped(started.run, blobs, final)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step70.zip"
        recipe = msgspec.json.format(msgspec.json.encode(parse(started.config)), indent=1)
        asyncio.run(exporting.write(source, file, recipe=recipe, steps=None, checkpoints=()))
        importing.lay_down(file, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
