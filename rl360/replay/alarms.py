"""What is wrong with a step, in words and numbers, the worst first. Pure. An empty answer means that nothing is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rl360.bus import events as ev
from rl360.replay.decide import Decision
from rl360.replay.effects import Effects
from rl360.replay.facts import StepFacts
from rl360.replay.reproduce import Difference
from rl360.trainer.metrics import StepMetrics

INFRA_ALARM: Final = 0.05
"""Share of a step's attempts lost to infrastructure from which a step is alarming though no kept group lost one."""


def alarms(facts: StepFacts, decision: Decision | None, rules: Mapping[str, Effects], differences: Sequence[Difference]) -> tuple[str, ...]:
    metrics = facts.tally.metrics()
    return (
        *_unfaithful(differences),
        *_lost(facts, decision, rules.get("legacy"), metrics),
        *_training(facts),
        *_stale(metrics),
        *_push(facts),
        *_engines(facts),
    )


def _unfaithful(differences: Sequence[Difference]) -> Iterator[str]:
    if differences:
        yield f"{len(differences)} recorded decisions do not follow from the journal, first: {differences[0]}"


def _lost(facts: StepFacts, decision: Decision | None, legacy: Effects | None, metrics: StepMetrics) -> Iterator[str]:
    causes = ", ".join(f"{cause} {n}" for cause, n in sorted(metrics.infra.items(), key=lambda item: -item[1]))
    lost = [a for a in decision.lost if isinstance(facts.outcomes.terminal(a), ev.InfraFailed)] if decision else []
    if decision is not None and lost:
        text = f"{len(lost)} of {decision.kept_samples} kept samples lost to infrastructure"
        if legacy is not None and legacy.gradient_scale is not None and legacy.advantage_shift is not None:
            scale, shift = legacy.gradient_scale, legacy.advantage_shift
            text += f"; under the old rules the gradient would be × {scale:.2f} and advantages {shift:+.2f}"
        yield f"{text} ({metrics.infra_total} of the step's {metrics.requested} attempts: {causes})"
    elif metrics.requested and metrics.infra_total / metrics.requested >= INFRA_ALARM:
        yield f"{metrics.infra_total} of {metrics.requested} attempts lost to infrastructure ({causes}), none of them in a kept group"


def _training(facts: StepFacts) -> Iterator[str]:
    trained = facts.trained
    if trained is None:
        return
    if trained.skipped:
        yield f"the step was skipped: {trained.why}"
    if trained.metrics.get("logp/alarm"):
        yield (
            f"trainer and sampler disagree: |Δ log p| up to {trained.metrics.get('logp/delta_max', 0.0):.1e}, "
            f"alarm above {facts.config.trainer.logp_alarm:g}"
        )


def _stale(metrics: StepMetrics) -> Iterator[str]:
    if metrics.stale:
        yield f"{metrics.stale} of {metrics.requested} attempts were too stale to train"


def _push(facts: StepFacts) -> Iterator[str]:
    for push in facts.pushes:
        failed = [r for r in push.results if not r.ok]
        if failed:
            yield f"push of version {push.version} failed for {len(failed)} of {len(push.results)} engines, first: {failed[0].error}"
    again = sum(push.attempt > 1 for push in facts.pushes)
    if again:
        yield f"{again} of {len(facts.pushes)} pushes were repeats, for engines that missed one or joined later"


def _engines(facts: StepFacts) -> Iterator[str]:
    for what, events in (("lost", facts.engines.lost), ("fenced", facts.engines.fenced)):
        if events:
            name, cause = next(iter(events.items()))
            yield f"{len(events)} engine generations {what}, first {name}: {cause}"
