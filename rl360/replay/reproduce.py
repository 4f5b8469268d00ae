"""The recorded decisions of a step, made again from the events before them and compared bit for bit. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl360.bus.codec import encode
from rl360.replay.decide import Decision, decide_step
from rl360.replay.facts import StepFacts
from rl360.replay.rules import ReplayRules


@dataclass(frozen=True)
class Difference:
    """A recorded decision that comes out differently. `seq`: the event that holds it."""

    what: str
    recorded: str
    again: str
    seq: int

    def __str__(self) -> str:
        return f"event {self.seq}, {self.what}: recorded {self.recorded}, decided again {self.again}"


@dataclass(frozen=True)
class Reproduction:
    """`checked` counts recorded decisions: groups, attempts' fates, divisor, samples, version, the step's counts."""

    decision: Decision
    checked: int
    differences: tuple[Difference, ...]


def reproduce(facts: StepFacts) -> Reproduction:
    """Decide the step again under the recorded rules. Raises ReplayError when it is not over."""
    decision = decide_step(facts, ReplayRules.of(facts.config))
    differences = (*_groups(facts, decision), *_training(facts, decision), *_closed(facts))
    attempts = sum(len(g.attempts) for g in facts.decided.values())
    checked = len(facts.decided) + attempts + (4 if facts.trained else 0) + (1 if facts.closed else 0)
    return Reproduction(decision, checked, tuple(sorted(differences, key=lambda d: d.seq)))


def _groups(facts: StepFacts, decision: Decision) -> Iterator[Difference]:
    for again in decision.groups:
        recorded = facts.decided.get(again.group)
        if recorded is not None and encode(recorded) != encode(again):
            seq = facts.seqs[f"group {again.group}"]
            yield from _fields(f"group {again.group}", recorded, again, seq, skip=("attempts",))
            for old, new in zip(recorded.attempts, again.attempts, strict=False):
                yield from _fields(f"attempt {old.attempt}", old, new, seq)
            if len(recorded.attempts) != len(again.attempts):
                yield Difference(f"group {again.group} attempts", str(len(recorded.attempts)), str(len(again.attempts)), seq)


def _training(facts: StepFacts, decision: Decision) -> Iterator[Difference]:
    trained, batch = facts.trained, decision.batch
    if trained is None:
        return
    seq = facts.seqs["trained"]
    if trained.skipped == bool(batch.refs):
        yield Difference("optimizer step", "skipped" if trained.skipped else "made", f"{len(batch.refs)} samples survive", seq)
        return
    digests = batch.digests
    if sorted(digests) != sorted(trained.sample_digests):
        only, missing = set(trained.sample_digests) - set(digests), set(digests) - set(trained.sample_digests)
        old, new = f"{len(trained.sample_digests)}, {len(only)} of them not kept", f"{len(digests)}, {len(missing)} not trained"
        yield Difference("samples", old, new, seq)
    version = batch.version + (not trained.skipped)
    for what, old, new in (("divisor", trained.divisor, batch.divisor), ("version", trained.version, version)):
        if old != new:
            yield Difference(what, repr(old), repr(new), seq)


def _closed(facts: StepFacts) -> Iterator[Difference]:
    if facts.closed is not None:
        again = facts.tally.closed(skipped=facts.closed.skipped, why=facts.closed.why)
        yield from _fields("step's counts", facts.closed, again, facts.seqs["closed"])


def _fields(what: str, recorded: object, again: object, seq: int, skip: tuple[str, ...] = ()) -> Iterator[Difference]:
    names: tuple[str, ...] = getattr(recorded, "__struct_fields__", ())
    for name in names:
        old, new = repr(getattr(recorded, name)), repr(getattr(again, name))
        if old != new and name not in skip:
            yield Difference(f"{what} {name}", old, new, seq)
