"""`rl360 audit`: checks a run's invariants from its journal alone, by deciding everything again.

    order       the journal: whole, each fact once, the recipe as its digest says
    outcomes    S12, S16: one terminal outcome an attempt, each trained reward from a verifier with its receipt
    decisions   S14, S18, S19, S23, S24: groups decided again, equal bit for bit
    training    S20, S21, S24: what each step trained on, its divisor, versions, staleness; nothing twice
    tokens      S1, S6, S8: trained tokens are the sampled ones, each with one log-prob and version; blobs are what their digests say
    merging     S6 to S9: sessions merged again, equal to the byte
    pushes      S24: every push completed, or the engine fenced or lost
    letters     every dead letter explained

A part of a journal (`Reading.steps`) is checked as far as it goes. What retention removed is not looked for: `notes` says so.
Not covered: whether the gradient is the one of those tokens (`rl360 replay --gradient` measures that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rl360.audit.decisions import DecisionCheck
from rl360.audit.finding import Check, Finding
from rl360.audit.letters import LetterCheck
from rl360.audit.merging import MergeCheck
from rl360.audit.order import OrderCheck
from rl360.audit.outcomes import OutcomeCheck
from rl360.audit.pushes import PushCheck
from rl360.audit.tokens import BlobCheck, TokenCheck
from rl360.audit.training import TrainingCheck
from rl360.bus import events as ev
from rl360.bus.blobs import BlobStore
from rl360.journal.pruned import Pruned
from rl360.journal.source import Reading

__all__ = ["Finding", "audit", "notes"]


def audit(journal: Reading, blobs: BlobStore) -> list[Finding]:
    """Everything in a journal that breaks a rule, in the order in which it shows. [] is clean.

    A run that is still going, or was interrupted, is clean as long as what it has done is right.
    """
    pruned = Pruned()
    for record in journal.records:
        pruned.on(record)
    checks: list[Check] = [
        OrderCheck(journal),
        OutcomeCheck(),
        DecisionCheck(),
        TrainingCheck(blobs, journal.steps),
        TokenCheck(blobs, pruned),
        MergeCheck(blobs),
        PushCheck(whole=journal.steps is None),
        LetterCheck(journal.dead_letters, journal.unread),
        BlobCheck(blobs, pruned),
    ]
    findings: list[Finding] = []
    for record in journal.records:
        for check in checks:
            findings += check.on(record)
    for check in checks:
        findings += check.end()
    return findings


def notes(journal: Reading) -> Iterator[str]:
    """What was not looked at, and why."""
    if journal.steps is not None:
        yield f"only what step {', '.join(map(str, sorted(journal.steps)))} needs was there to check"
    for type_, n in sorted(Counter(journal.unknown.values()).items()):
        yield f"{n} events of type {type_}, which this version of RL360 doesn't know, were skipped"
    for record in journal.records:
        if isinstance(event := record.event, ev.BlobsPruned):
            steps = f"{event.first} to {event.last}" + (f" but {', '.join(map(str, event.kept))}" if event.kept else "")
            yield f"pruned by retention: {event.blobs} blobs of steps {steps}; the tokens in them were not checked"
