"""The real gradient of a decided step: stored samples through the weights that the step started from. Needs the `trainer` extra.

Nothing is written: the checkpoint is read, gradients are taken, and that is all.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import time
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rl360.config import Config
from rl360.journal.manifest import POLICY
from rl360.replay.compare import Measured
from rl360.replay.decide import Decision
from rl360.replay.facts import StepFacts
from rl360.replay.rules import ReplayRules
from rl360.trainer import checkpoints
from rl360.trainer.commands import Restore
from rl360.trainer.distributed import process_groups
from rl360.trainer.ledger import command
from rl360.trainer.loss import Objective
from rl360.trainer.rank import START, Rank


def measure(facts: StepFacts, folder: Path, before: Decision, after: Decision) -> Measured:
    """Gradients of both decisions, on one rank. `folder`: the run's, with blobs and checkpoints.

    Raises CheckpointError when the weights that the step started from are gone, BlobError when a sample is.
    """
    version = before.batch.version
    path = _checkpoint(folder, version)
    config = _here(_alone(facts.config), folder)
    started = time.perf_counter()
    with process_groups():
        rank = Rank(config, folder)
        rank.perform(Restore("" if path is None else str(path)))
        gradients = [_gradient(rank, decision, config) for decision in (before, after)]
    norms = [_dot(g, g) ** 0.5 for g in gradients]
    return Measured(
        recorded_norm=facts.trained.grad_norm if facts.trained and not facts.trained.skipped else None,
        norms=(norms[0], norms[1]),
        ratio=norms[1] / norms[0] if norms[0] else None,
        cosine=_dot(*gradients) / (norms[0] * norms[1]) if all(norms) else None,
        checkpoint=path.name if path else "the starting policy",
        seconds=time.perf_counter() - started,
    )


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a.double(), b.double()).item()


def _checkpoint(folder: Path, version: int) -> Path | None:
    """Where the weights of `version` lie; None: they are the starting policy."""
    if version == START:
        return None
    found = checkpoints.of_version(folder / checkpoints.FOLDER, version)
    if found is None:
        raise checkpoints.CheckpointError(
            f"{folder / checkpoints.FOLDER}: no checkpoint of version {version}, which the step started from; "
            f"it was pruned, or the run was exported without it: leave --gradient away, or export with --with-checkpoint"
        )
    return found.path


def _alone(config: Config) -> Config:
    """The recipe on one rank: sums don't depend on how samples are spread (S20)."""
    return msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, dp=1))


def _here(config: Config, folder: Path) -> Config:
    """With the policy that the run made where the folder lies now: it may have been moved, or imported from another machine."""
    made = folder / POLICY
    if not made.is_dir():
        return config
    return msgspec.structs.replace(config, policy=msgspec.structs.replace(config.policy, path=str(made)))


def _gradient(rank: Rank, decision: Decision, config: Config) -> Tensor:
    if not decision.batch.refs:
        return torch.zeros(sum(p.numel() for _, p in rank.policy.parameters()))
    divided = msgspec.structs.replace(
        command(decision.batch, dp=1, microbatch_tokens=config.trainer.microbatch_tokens), divisor=decision.divisor
    )
    return rank.gradient(divided, objective(decision.rules, config))


def objective(rules: ReplayRules, config: Config) -> Objective:
    """The recipe's objective with what the rules change."""
    trainer = config.trainer
    return Objective(rules.eps_low, rules.eps_high, rules.tis_cap, rules.tis_floor, trainer.kl_coef, trainer.entropy_coef)
