"""Which groups train, and with what advantages (S14, S18, S19, S24). Pure: the filter and the audit call the same function.

One valid set feeds everything: attempts whose reward a verifier wrote, that no rule masks and that are fresh enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rl360.bus import events as ev
from rl360.config import Config
from rl360.trainer.advantages import advantages
from rl360.trainer.outcomes import AttemptOutcome, Outcomes

Policing = Literal["verify", "mask", "zero"]

EVAL = "eval"
EMPTY = "empty"


@dataclass(frozen=True)
class Rules:
    """The recipe's choices about groups."""

    agent_timeout: Policing = "verify"
    truncation: Policing = "verify"
    format_error_penalty: float = 0.0
    advantage_std: bool = False
    max_staleness: int = 1

    @staticmethod
    def of(config: Config) -> Rules:
        return Rules(
            agent_timeout=config.agent.agent_timeout,
            truncation=config.agent.truncation,
            format_error_penalty=config.reward.format_error_penalty,
            advantage_std=config.trainer.advantage_std,
            max_staleness=config.trainer.max_staleness,
        )

    def policing(self, end: ev.AgentEnd) -> tuple[Policing, str]:
        """What the recipe does about the way an agent ended, and the name of the rule (S14)."""
        if end is ev.AgentEnd.TIMEOUT:
            return self.agent_timeout, "agent_timeout"
        if end in (ev.AgentEnd.LENGTH, ev.AgentEnd.CONTEXT):
            return self.truncation, "truncation"
        return "verify", ""


@dataclass(frozen=True)
class GroupContext:
    """Where a group belongs. `trained_on`: policy version that the step's optimizer step starts from (S24)."""

    run: str
    step: int
    trained_on: int
    purpose: ev.Purpose = ev.Purpose.TRAIN


@dataclass(frozen=True)
class Verdict:
    """An attempt seen by itself. `fate` None: it is valid."""

    attempt: str
    raw: float | None
    reward: float | None
    fate: ev.Fate | None = None
    reason: str = ""


def decide_group(spec: ev.GroupSpec, outcomes: Sequence[AttemptOutcome], rules: Rules, context: GroupContext) -> ev.GroupDecided:
    """Decide a group whose attempts are all over: kept or dropped with a reason, and the fate of every attempt.

    `outcomes` has one entry for each of `spec.attempts`. Fate `trained` is provisional until `StepTrained`.
    An evaluation group is never kept (reason "eval"); its rewards are recorded. Raises ValueError for a wrong count.
    """
    if len({o.attempt for o in outcomes}) != spec.attempts or len(outcomes) != spec.attempts:
        raise ValueError(f"group {spec.group} of step {context.step}: {len(outcomes)} outcomes, {spec.attempts} attempts")
    verdicts = [judge(o, rules, context) for o in outcomes]
    valid = [v for v in verdicts if v.fate is None]
    reason = EVAL if context.purpose is ev.Purpose.EVAL else why_dropped(verdicts, outcomes)
    result = None if reason else advantages([v.reward for v in valid if v.reward is not None], std=rules.advantage_std)
    share = {} if result is None else dict(zip((v.attempt for v in valid), result.values, strict=True))
    return ev.GroupDecided(
        run=context.run,
        step=context.step,
        group=spec.group,
        domain=spec.domain,
        kept=not reason,
        reason=reason,
        baseline=None if result is None else result.baseline,
        n_valid=len(valid),
        attempts=tuple(_decision(v, share.get(v.attempt), reason) for v in verdicts),
        purpose=context.purpose,
    )


def judge(outcome: AttemptOutcome, rules: Rules, context: GroupContext) -> Verdict:
    """One attempt: valid, masked or stale, and with what reward (S12, S14, S24)."""
    terminal = outcome.terminal
    if isinstance(terminal, ev.InfraFailed):
        return Verdict(outcome.attempt, None, None, ev.Fate.MASKED, f"{terminal.boundary}/{terminal.cause}")
    raw = terminal.reward
    if not (math.isfinite(raw) and terminal.low <= raw <= terminal.high):  # not a reward, whoever wrote it (S12)
        return Verdict(outcome.attempt, None, None, ev.Fate.MASKED, f"{ev.Boundary.VERIFIER}/{ev.Cause.BAD_REWARD}")
    if outcome.sampled == 0:
        return Verdict(outcome.attempt, raw, None, ev.Fate.MASKED, EMPTY)
    policing, rule = rules.policing(terminal.agent_end)
    if policing == "mask":
        return Verdict(outcome.attempt, raw, None, ev.Fate.MASKED, rule)
    reward, note = (terminal.low, rule) if policing == "zero" else (_shaped(outcome, terminal, rules), "")
    if context.purpose is ev.Purpose.TRAIN and staleness(outcome, context.trained_on) > rules.max_staleness:
        return Verdict(outcome.attempt, raw, reward, ev.Fate.STALE, f"{staleness(outcome, context.trained_on)} versions behind")
    return Verdict(outcome.attempt, raw, reward, None, note)


def _shaped(outcome: AttemptOutcome, terminal: ev.VerifierResult, rules: Rules) -> float:
    """The verifier's reward, less the penalty for a pass with a format error."""
    sloppy = any(m.format_errors for m in outcome.merged)
    return terminal.reward - rules.format_error_penalty if sloppy and terminal.reward == terminal.high else terminal.reward


def staleness(outcome: AttemptOutcome, trained_on: int) -> int:
    """Versions between the oldest sampled token and the weights that train on it (S24)."""
    return trained_on - min(m.min_version for m in outcome.merged if m.sampled)


def why_dropped(verdicts: Sequence[Verdict], outcomes: Sequence[AttemptOutcome]) -> str:
    """ "" for a group that trains: at least two valid attempts whose rewards disagree (S18)."""
    pairs = zip(verdicts, outcomes, strict=True)
    valid = [(v, o.terminal) for v, o in pairs if v.fate is None and isinstance(o.terminal, ev.VerifierResult)]
    stale = sum(v.fate is ev.Fate.STALE for v in verdicts)
    if len(valid) < 2:
        return ev.DropReason.STALE if len(valid) + stale >= 2 else ev.DropReason.INSUFFICIENT_VALID
    if len({v.reward for v, _ in valid}) > 1:
        return ""
    if all(v.reward == t.low for v, t in valid):
        return ev.DropReason.ALL_FAIL
    return ev.DropReason.ALL_PASS if all(t.reward == t.high for _, t in valid) else ev.DropReason.NO_DISAGREEMENT


def _decision(verdict: Verdict, advantage: float | None, reason: str) -> ev.AttemptDecision:
    return ev.AttemptDecision(
        attempt=verdict.attempt,
        fate=verdict.fate or (ev.Fate.DROPPED if reason else ev.Fate.TRAINED),
        reason=verdict.reason if verdict.fate else reason or verdict.reason,
        raw_reward=verdict.raw,
        reward=verdict.reward,
        advantage=advantage,
    )


@dataclass(frozen=True)
class Survivor:
    """A sample that the step trains on."""

    merged: ev.TrajectoryMerged
    advantage: float


def survivors(decided: Iterable[ev.GroupDecided], outcomes: Outcomes) -> tuple[Survivor, ...]:
    """All samples of a step's kept groups (S21), by group, attempt and branch: a branch has its attempt's advantage.

    A branch without a sampled token of its own has nothing to train and is no sample.
    Raises ValueError when the samples of a kept attempt are not all in `outcomes`.
    """
    chosen: list[Survivor] = []
    for group in sorted(decided, key=lambda g: g.group):
        for attempt in group.attempts:
            if attempt.fate is not ev.Fate.TRAINED or attempt.advantage is None:
                continue
            outcome = outcomes.complete(attempt.attempt)
            if outcome is None:
                raise ValueError(f"{attempt.attempt}: kept, but its samples are not in the journal")
            chosen += (Survivor(m, attempt.advantage) for m in outcome.merged if m.sampled)
    return tuple(chosen)
