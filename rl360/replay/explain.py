"""Where a step's gradient went, as data. Pure: from `StepFacts` alone, every mean with its n.

A sample's *share* of the gradient is the sum of |advantage| x token weight over its sampled tokens, as part of that sum over the whole
step: what the loss gives it before the model has its say. `rl360 replay --gradient` measures the real gradient.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from rl360.bus import events as ev
from rl360.replay.alarms import alarms
from rl360.replay.decide import Decision, decide_step
from rl360.replay.effects import Effects, effects
from rl360.replay.facts import ReplayError, StepFacts
from rl360.replay.reproduce import Difference, reproduce
from rl360.replay.rules import RECORDED, ReplayRules, preset
from rl360.trainer.group_filter import attempts_of

COMPARED = ("rl360", "legacy")
"""Presets that an explanation sets beside the recorded rules."""


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts that failed for one cause, and where."""

    cause: str  # boundary/cause
    n: int
    nodes: dict[str, int]
    generations: dict[str, int]
    images: dict[str, int]
    exceptions: dict[str, int]


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    group: int
    task: str
    domain: str
    kept: bool
    reason: str
    attempts: int
    valid: int
    infra: int
    reward_mean: float | None  # over valid attempts
    baseline: float | None
    share: float  # of the step's gradient
    fates: tuple[str, ...]  # of each attempt: reinforced, discouraged, trained (advantage 0), passed, failed, masked, infra, stale, open


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    sampled: int  # of all samples
    trained: int
    stale: int  # trained tokens older than the weights that they train
    by_version: dict[str, int]  # sampled tokens, from the turns
    truncated: int  # attempts that ended by length or context
    dropped_turns: int
    cut: int
    branches: int  # samples beyond one an attempt
    format_errors: int


class Push(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    attempt: int
    path: str
    why: str
    engines: dict[str, str]  # generation: "ok" or the error
    calls: int
    bytes: int
    seconds: float
    pause_seconds: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Of one training step. `rules`: what the recorded rules and older ones make of it; empty while attempts are open."""

    run: str
    step: int
    alarms: tuple[str, ...]
    state: str  # trained | skipped | open
    why: str
    counts: dict[str, int]  # requested, valid, masked, stale, infra, late, kept, trained
    lost: tuple[Lost, ...]
    agent_ends: dict[str, int]
    groups: tuple[GroupRow, ...]
    dropped: dict[str, int]
    domains: dict[str, float]  # share of the gradient
    tokens: Tokens
    reduction: str
    divisor: float | None
    versions: dict[str, float | int]
    rules: dict[str, Effects]
    metrics: dict[str, float]
    seconds: dict[str, float]
    pushes: tuple[Push, ...]
    engines: dict[str, dict[str, str]]
    turns: dict[str, int]  # by engine generation
    differences: tuple[str, ...]  # recorded decisions that don't follow from the journal


def explain(facts: StepFacts) -> Explanation:
    """Works on a step that is still open too: what isn't known yet is left out."""
    decision, differences = _decision(facts)
    shares = _shares(decision)
    groups = tuple(_group_row(facts, spec, shares) for spec in facts.opened.groups)
    rules = {} if decision is None else _rules(facts, decision)
    metrics = facts.tally.metrics()
    return Explanation(
        run=facts.run,
        step=facts.step,
        alarms=alarms(facts, decision, rules, differences),
        state="open" if facts.trained is None else "skipped" if facts.trained.skipped else "trained",
        why=facts.trained.why if facts.trained else "",
        counts={
            "requested": metrics.requested,
            "valid": metrics.valid.n,
            "masked": metrics.masked,
            "stale": metrics.stale,
            "infra": metrics.infra_total,
            "late": facts.late,
            "groups": metrics.groups,
            "groups_kept": metrics.groups_kept,
            "kept": metrics.kept.n,
            "trained": metrics.trained,
        },
        lost=_lost(facts),
        agent_ends=_agent_ends(facts),
        groups=groups,
        dropped=metrics.dropped,
        domains=_domains(groups),
        tokens=_tokens(facts, decision),
        reduction=facts.config.trainer.loss_reduction,
        divisor=facts.trained.divisor if facts.trained else None,
        versions=_versions(facts),
        rules=rules,
        metrics=metrics.flat(),
        seconds=dict(facts.trained.seconds) if facts.trained else {},
        pushes=tuple(_push(facts, p) for p in facts.pushes),
        engines={
            "joined": dict.fromkeys(facts.engines.joined, ""),
            "lost": dict(facts.engines.lost),
            "fenced": dict(facts.engines.fenced),
            "restarts": dict(facts.engines.restarts),
        },
        turns=dict(sorted(Counter(t.generation for t in facts.turns).items())),
        differences=tuple(map(str, differences)),
    )


def _decision(facts: StepFacts) -> tuple[Decision | None, tuple[Difference, ...]]:
    try:
        made = reproduce(facts)
    except ReplayError:
        return None, ()
    return made.decision, made.differences


def _rules(facts: StepFacts, decision: Decision) -> dict[str, Effects]:
    recorded = ReplayRules.of(facts.config)
    others = {n: effects(decide_step(facts, preset(recorded, n)), decision) for n in COMPARED}
    return {RECORDED: effects(decision, decision), **others}


def _shares(decision: Decision | None) -> dict[int, float]:
    """Group -> its share of the step's gradient."""
    if decision is None:
        return {}
    group_of = {a.attempt: g.group for g, a in decision.trained}
    mass: defaultdict[int, list[float]] = defaultdict(list)
    for ref in decision.batch.refs:
        mass[group_of[ref.attempt]].append(abs(ref.advantage) * ref.weight * ref.sampled)
    total = math.fsum(m for masses in mass.values() for m in masses)
    return {group: math.fsum(masses) / total for group, masses in mass.items()} if total else {}


def _domains(groups: Iterable[GroupRow]) -> dict[str, float]:
    by_domain: defaultdict[str, list[float]] = defaultdict(list)
    for row in groups:
        by_domain[row.domain].append(row.share)
    return {domain: math.fsum(shares) for domain, shares in sorted(by_domain.items())}


def _group_row(facts: StepFacts, spec: ev.GroupSpec, shares: dict[int, float]) -> GroupRow:
    decided = facts.decided.get(spec.group)
    terminals = [facts.outcomes.terminal(a) for a in attempts_of(facts.opened, spec)]
    valid = [a.reward for a in decided.attempts if a.fate in (ev.Fate.TRAINED, ev.Fate.DROPPED)] if decided else []
    rewards = [r for r in valid if r is not None]
    by_attempt = {a.attempt: a for a in decided.attempts} if decided else {}
    return GroupRow(
        group=spec.group,
        task=spec.task,
        domain=spec.domain,
        kept=decided is not None and decided.kept,
        reason=decided.reason if decided else "open",
        attempts=spec.attempts,
        valid=len(valid),
        infra=sum(isinstance(t, ev.InfraFailed) for t in terminals),
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
        baseline=decided.baseline if decided else None,
        share=shares.get(spec.group, 0.0),
        fates=tuple(_fate(by_attempt.get(a), facts.outcomes.terminal(a)) for a in attempts_of(facts.opened, spec)),
    )


def _fate(decision: ev.AttemptDecision | None, terminal: ev.VerifierResult | ev.InfraFailed | None) -> str:
    if isinstance(terminal, ev.InfraFailed):
        return "infra"
    if decision is None or terminal is None:
        return "open"
    if decision.advantage:
        return "reinforced" if decision.advantage > 0 else "discouraged"
    if decision.fate in (ev.Fate.MASKED, ev.Fate.STALE, ev.Fate.TRAINED):
        return str(decision.fate)
    return "passed" if terminal.reward == terminal.high else "failed"


def _lost(facts: StepFacts) -> tuple[Lost, ...]:
    failures: defaultdict[str, list[ev.InfraFailed]] = defaultdict(list)
    for terminal in _terminals(facts):
        if isinstance(terminal, ev.InfraFailed):
            failures[f"{terminal.boundary}/{terminal.cause}"].append(terminal)
    return tuple(
        Lost(
            cause=cause,
            n=len(listed),
            nodes=_count(f.node for f in listed),
            generations=_count(f.generation for f in listed),
            images=_count(f.image for f in listed),
            exceptions=_count(f.exception for f in listed),
        )
        for cause, listed in sorted(failures.items(), key=lambda item: (-len(item[1]), item[0]))
    )


def _terminals(facts: StepFacts) -> list[ev.VerifierResult | ev.InfraFailed]:
    attempts = [a for spec in facts.opened.groups for a in attempts_of(facts.opened, spec)]
    return [t for a in attempts if (t := facts.outcomes.terminal(a)) is not None]


def _agent_ends(facts: StepFacts) -> dict[str, int]:
    return _count(str(t.agent_end) for t in _terminals(facts) if t.agent_end is not None)


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(v for v in values if v).items(), key=lambda item: (-item[1], item[0])))


def _tokens(facts: StepFacts, decision: Decision | None) -> Tokens:
    outcomes = [o for spec in facts.opened.groups for o in facts.attempts(spec) if o is not None]
    merged = [m for o in outcomes for m in o.merged]
    by_version: Counter[int] = Counter()
    trained_sessions: Counter[int] = Counter()
    training = {ref.attempt for ref in decision.batch.refs} if decision else set[str]()
    for turn in facts.turns:
        for span in turn.spans:
            by_version[span.version] += span.end - span.start
            if turn.attempt in training:
                trained_sessions[span.version] += span.end - span.start
    ends = _agent_ends(facts)
    return Tokens(
        sampled=sum(m.sampled for m in merged),
        trained=sum(ref.sampled for ref in decision.batch.refs) if decision else 0,
        stale=sum(n for v, n in trained_sessions.items() if facts.trained_on is not None and v < facts.trained_on),
        by_version={str(v): n for v, n in sorted(by_version.items())},
        truncated=ends.get(ev.AgentEnd.LENGTH, 0) + ends.get(ev.AgentEnd.CONTEXT, 0),
        dropped_turns=sum(m.dropped_turns for m in merged),
        cut=sum(m.cut_tokens for m in merged),
        branches=len(merged) - sum(1 for o in outcomes if o.merged),
        format_errors=sum(m.format_errors for m in merged),
    )


def _versions(facts: StepFacts) -> dict[str, float | int]:
    trained = facts.trained
    known: dict[str, float | int | None] = {
        "opened_with": facts.opened.version,
        "trained_on": facts.trained_on,
        "after": trained.version if trained else None,
        "staleness_mean": trained.metrics.get("staleness/mean") if trained else None,
        "staleness_max": trained.metrics.get("staleness/max") if trained else None,
        "staleness_bound": facts.config.trainer.max_staleness,
    }
    return {name: value for name, value in known.items() if value is not None}


def _push(facts: StepFacts, pushed: ev.WeightsPushed) -> Push:
    plan = facts.plans.get(pushed.plan)
    return Push(
        version=pushed.version,
        attempt=pushed.attempt,
        path=pushed.path,
        why=plan.why if plan else "",
        engines={r.generation: "ok" if r.ok else r.error for r in pushed.results},
        calls=sum(r.calls for r in pushed.results),
        bytes=sum(r.bytes for r in pushed.results),
        seconds=pushed.seconds,
        pause_seconds=pushed.pause_seconds,
    )
