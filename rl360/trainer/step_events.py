"""The StepTrained event of a step: from its batch and what the optimizer step answered. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl360.bus import events as ev
from rl360.trainer.step_batch import StepBatch


@dataclass(frozen=True)
class Measured:
    """What the optimizer step and the checkpoint measured."""

    loss: float
    grad_norm: float
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]


def trained(run: str, batch: StepBatch, measured: Measured, *, checkpoint: str, alarm_above: float) -> ev.StepTrained:
    """One optimizer step was made. `logp/alarm` is 1 when trainer and sampler disagree by more than `alarm_above` (nats)."""
    alarm = measured.metrics.get("logp/delta_max", 0.0) > alarm_above
    return ev.StepTrained(
        run=run,
        step=batch.step,
        version=batch.version + 1,
        samples=len(batch.refs),
        tokens=sum(ref.sampled for ref in batch.refs),
        divisor=batch.divisor,
        loss=measured.loss,
        grad_norm=measured.grad_norm,
        metrics={**measured.metrics, "logp/alarm": float(alarm)},
        seconds=dict(measured.seconds),
        checkpoint=checkpoint,
        sample_digests=batch.digests,
    )


def skipped(run: str, batch: StepBatch, *, checkpoint: str) -> ev.StepTrained:
    """Nothing survived: no optimizer step, the version stays, and the journal says why (S21)."""
    return ev.StepTrained(
        run=run,
        step=batch.step,
        version=batch.version,
        samples=0,
        tokens=0,
        divisor=0.0,
        loss=0.0,
        grad_norm=0.0,
        metrics={},
        seconds={},
        checkpoint=checkpoint,
        skipped=True,
        why=batch.why,
    )
