"""One rank: holds the policy, or its part of it, and carries out commands. Rank 0 is no different, it only gets the answers too.

Everything here runs inside the platform, in one thread.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rl360.bus.blobs import BlobStore
from rl360.bus.sample import SampleError
from rl360.config import Config
from rl360.engines.checksum import checksum_of
from rl360.engines.expert_rank import ExpertRank
from rl360.engines.plan import expert_of
from rl360.engines.weights import HeldExpert, shard_spec
from rl360.trainer import checkpoints, commands, dist_state, exchange
from rl360.trainer.agreement import Agreement
from rl360.trainer.batch import Microbatch, PackedBatch, Replay, TrainSample, pack, train_sample
from rl360.trainer.commands import SampleRef, Train
from rl360.trainer.copies import WeightCopies
from rl360.trainer.loss import Objective, merge_sums
from rl360.trainer.model import own_layers
from rl360.trainer.policy import Policy, StepResult
from rl360.trainer.progress import oldest
from rl360.trainer.spec import ModelSpec

log = logging.getLogger(__name__)

START: Final = 0
"""Version of the starting policy."""


@dataclass(frozen=True)
class Answer:
    """What a command gave, on rank 0."""

    loss: float = 0.0
    grad_norm: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    weights: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # by HF name, in the engines' dtype
    experts: Sequence[HeldExpert] = ()  # of all ranks, where they stay with them


class Rank:
    """One of `config.trainer.ranks` ranks; `folder` is the run's."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._blobs = BlobStore(folder / "blobs")
        self._root = folder / checkpoints.FOLDER
        self._start = config.policy.folder
        self.policy = Policy(ModelSpec.read(self._start), config.trainer, config.sampling.temperature)
        self._replays = _replay(self.policy) if config.trainer.routing_replay else None
        self._version = START
        self._recomputes = config.trainer.old_policy == "keep_old_actor"
        lags = self._recomputes or oldest(config.run.schedule, config.push.every) > 0
        device = torch.device("cpu" if config.trainer.copies == "cpu" else torch.cuda.current_device())
        self._copies = WeightCopies(config.trainer.max_staleness + 1 if lags else 0, device)
        self._reference = WeightCopies(1 if config.trainer.kl_coef else 0, device)
        self.experts = ExpertRank()  # sends what this rank exported, in threads of its own

    def perform(self, command: commands.Command) -> Answer:
        """Carry out one command. All ranks get the same commands in the same order."""
        match command:
            case commands.Restore(path):
                return self._restore(path)
            case commands.Train():
                return self._train(command)
            case commands.Save(step):
                dist_state.write(self.policy, self._root, step)
                return Answer()
            case commands.Export():
                return self._export(command)
            case commands.Stop():
                return Answer()

    # ------------------------------------------------------------------------------------------------ weights

    def _restore(self, path: str) -> Answer:
        self.policy.load_hf(self._start)
        self._reference.hold(START, self.policy.parameters())
        if path:
            checkpoint = checkpoints.verify(Path(path))
            for version in range(checkpoint.manifest.version - self._config.trainer.max_staleness, checkpoint.manifest.version):
                self._recall(version)
            dist_state.load(self.policy, checkpoint)
            self._version = checkpoint.manifest.version
        self._copies.hold(self._version, self.policy.parameters())
        return Answer()

    def _recall(self, version: int) -> None:
        """Hold the copy of an older version again, where its checkpoint is still there."""
        if not self._copies.limit:
            return
        try:
            weights = self._weights(version)
        except checkpoints.CheckpointError as e:
            log.warning("weights of version %d are not held: %s", version, e)
            return
        if weights is not None:
            self._copies.hold(version, weights.items())

    def _weights(self, version: int) -> Mapping[str, Tensor] | None:
        """Weights of an older version by megatron name, from where they lie."""
        if version == START:
            return dict(self.policy.hf_weights(self._start))
        checkpoint = checkpoints.of_version(self._root, version) if version > START else None
        return None if checkpoint is None else dist_state.load_weights(self.policy, checkpoint)

    def _export(self, order: commands.Export) -> Answer:
        """Raises CheckpointError when the version is gone."""
        version, weights = order.version, None
        if version != self._version:
            weights = self._copies.weights(version) if version in self._copies else self._weights(version)
            if weights is None:
                raise checkpoints.CheckpointError(f"{self._root}: no checkpoint of version {version}, which the engines still serve")
        dtype: torch.dtype = getattr(torch, self._config.engine.dtype)
        named = {name: tensor.to("cpu", dtype) for name, tensor in self.policy.export(weights, apart=order.apart)}
        if not order.apart:
            return Answer(weights=named)
        own = {name: named.pop(name) for name in list(named) if expert_of(name) is not None}
        self.experts.hold(version, own)
        return Answer(weights=named, experts=self._all_experts(own))

    def _all_experts(self, own: Mapping[str, Tensor]) -> list[HeldExpert]:
        """What every rank sends, and how it is to be found again at the engines."""
        rank, sums = dist.get_rank(), checksum_of(own.items())
        mine = [HeldExpert(shard=shard_spec(name, t, rank=rank), checksum=sums[name]) for name, t in own.items()]
        return [expert for held in exchange.gather(mine, list[HeldExpert]) for expert in held]

    # ------------------------------------------------------------------------------------------------ training

    def _train(self, train: Train) -> Answer:
        started = time.perf_counter()
        batches = self._batches(train)
        loaded = time.perf_counter()
        agreement = Agreement()
        old = self._old_logprobs(batches, train, agreement)
        ref = self._ref_logprobs(batches)
        scored = time.perf_counter()
        result = self.policy.step(batches, train.divisor, version=train.version, old_logprobs=old, ref_logprobs=ref)
        self._version = train.version + 1
        self._copies.hold(self._version, self.policy.parameters())
        agreement.merge(result.agreement)
        seconds = {"load": loaded - started, "old_logprobs": scored - loaded, **result.seconds}
        stale = _Staleness.of(batches, train.version)
        return _answer(result, agreement, stale, train.divisor, seconds, scores=self.policy.layout.scores)

    def gradient(self, train: Train, objective: Objective) -> Tensor:
        """What `Train` would hand to the optimizer under `objective`, float32 [parameters]; nothing changes. For replays."""
        batches = self._batches(train)
        old, ref = self._old_logprobs(batches, train, Agreement()), self._ref_logprobs(batches)
        own, self.policy.objective = self.policy.objective, objective
        try:
            return self.policy.gradient(batches, train.divisor, version=train.version, old_logprobs=old, ref_logprobs=ref)
        finally:
            self.policy.objective = own

    def _batches(self, train: Train) -> list[PackedBatch]:
        layout = self.policy.layout
        own = (Microbatch(tuple(map(self._read, refs))) for refs in train.ranks[layout.dp_rank])
        return [layout.tokens(pack(microbatch, self._replays, layout.token_multiple)) for microbatch in own]

    def _ref_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor] | None:
        """Under the starting policy, which routes by itself: what the sampler chose is no part of it (S11)."""
        if not self._config.trainer.kl_coef:
            return None
        return self._reference.score(self.policy, [batch.routed_freely() for batch in batches], START)

    def _read(self, ref: SampleRef) -> TrainSample:
        routing = self._blobs.unpack(ref.routing) if self._replays and ref.routing else None  # the largest part of a sample
        sample = train_sample(self._blobs.unpack(ref.sample), advantage=ref.advantage, routing=routing, weight=ref.weight)
        if sample.sampled != ref.sampled or len(sample) != ref.tokens:
            raise SampleError(
                f"{ref.attempt}/{ref.branch}: the sample has {len(sample)} tokens, {sample.sampled} sampled; "
                f"its TrajectoryMerged says {ref.tokens} and {ref.sampled}"
            )
        return sample

    def _old_logprobs(self, batches: Sequence[PackedBatch], train: Train, agreement: Agreement) -> list[Tensor] | None:
        """Under each token's own version (S22). Where the recipe doesn't ask, one microbatch tells whether the engines agree."""
        older = [v for v in train.versions if v != train.version]
        if self._recomputes:
            old = self._copies.logprobs(self.policy, batches, train.versions)
            agreement.add_all(old, batches, older)
            return old
        probed = [v for v in older if v in self._copies]
        if probed:
            agreement.add_all(self._copies.logprobs(self.policy, batches[:1], probed), batches[:1], probed)
        return None


@dataclass(frozen=True)
class _Staleness:
    """Versions between token and trained weights (S24), over sampled tokens."""

    total: float
    maximum: float

    @property
    def part(self) -> _Part:
        return _Part({"stale": self.total}, {"stale": self.maximum})

    @staticmethod
    def of(batches: Sequence[PackedBatch], version: int) -> _Staleness:
        lags = torch.cat([version - batch.versions[batch.mask] for batch in batches])
        return _Staleness(lags.sum().item(), lags.max().item() if len(lags) else 0.0)


def _replay(policy: Policy) -> Replay:
    """The recorded layers that this rank's stage replays."""
    experts, own = policy.spec.experts, own_layers(policy.spec, policy.layout)
    assert experts is not None  # the policy refused it
    return Replay(experts.routing, slice(sum(experts.layers[: own.start]), sum(experts.layers[: own.stop])))


def _answer(
    result: StepResult, agreement: Agreement, stale: _Staleness, divisor: float, seconds: Mapping[str, float], *, scores: bool
) -> Answer:
    """Add up over ranks and name the metrics. `scores`: this rank's log-probs count."""
    own = [
        _Part({"choices/rows": result.choices.rows, "choices/differ": result.choices.differ}, {}),
        *([_Part(result.sums, result.maxima), _Part(agreement.sums, {"agree": agreement.maximum}), stale.part] if scores else []),
    ]
    sums, maxima = _reduced(own)
    compared, total, kl, worst = sums.pop("agree/tokens"), sums.pop("agree/total"), sums.pop("agree/kl"), maxima.pop("agree")
    lag, oldest = sums.pop("stale"), maxima.pop("stale")
    replayed, differ = sums.pop("choices/rows"), sums.pop("choices/differ")
    metrics = {
        **merge_sums(sums, maxima),
        "train/grad_norm": result.grad_norm,
        "staleness/mean": lag / sums["tokens"],
        "staleness/max": oldest,
        "logp/delta_n": compared,
    }
    if compared:
        metrics |= {"logp/delta_mean": total / compared, "logp/delta_max": worst, "logp/kl": kl / compared}
    if replayed:  # rows of a token in a layer whose router would have chosen other experts than the sampler's
        metrics |= {"routing/differ_rate": differ / replayed, "routing/replayed_n": replayed}
    loss = sums["loss"] / divisor
    return Answer(loss=loss, grad_norm=result.grad_norm, metrics={**metrics, "train/loss": loss}, seconds=seconds)


class _Part(msgspec.Struct, frozen=True):
    sums: dict[str, float]
    maxima: dict[str, float]


def _reduced(own: Sequence[_Part]) -> tuple[dict[str, float], dict[str, float]]:
    """Of all ranks. They bring different keys: log-probs are on the last stage alone."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for found in itertools.chain.from_iterable(exchange.gather(list(own), list[_Part])):
        for key, value in found.sums.items():
            sums[key] = sums.get(key, 0.0) + value
        for key, value in found.maxima.items():
            maxima[key] = max(maxima.get(key, value), value)
    return sums, maxima
