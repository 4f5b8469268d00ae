"""`rl360 audit`: checks a run's invariants from its journal alone, by deciding everything again.

    outcomes    S12, S16: one terminal outcome an attempt, each reward with its verifier's receipt
    decisions   S14, S18, S19, S23, S24: groups decided again, equal bit for bit
    training    S20, S21, S24: what each step trained on, its divisor, versions, staleness; nothing twice
    tokens      S1, S6, S8: trained tokens are the sampled ones; blobs are what their digests say

Not covered: whether the gradient is the one of those tokens (the trainer's tests prove that).
"""

from __future__ import annotations

from collections.abc import Iterable

from rl360.audit.decisions import DecisionCheck
from rl360.audit.finding import Check, Finding
from rl360.audit.order import OrderCheck
from rl360.audit.outcomes import OutcomeCheck
from rl360.audit.tokens import BlobCheck, TokenCheck
from rl360.audit.training import TrainingCheck
from rl360.bus.blobs import BlobStore
from rl360.bus.codec import Recorded

__all__ = ["Finding", "audit"]


def audit(records: Iterable[Recorded], blobs: BlobStore) -> list[Finding]:
    """Everything in a whole journal (all events, in order) that breaks a rule, in the order in which it shows. [] is clean.

    A run that is still going, or was interrupted, is clean as long as what it has done is right.
    """
    checks: list[Check] = [OrderCheck(), OutcomeCheck(), DecisionCheck(), TrainingCheck(blobs), TokenCheck(blobs), BlobCheck(blobs)]
    findings: list[Finding] = []
    for record in records:
        for check in checks:
            findings += check.on(record)
    for check in checks:
        findings += check.end()
    return findings
