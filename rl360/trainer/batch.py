"""From the step's surviving samples to packed tensors (S21): all of them are used, none is trimmed off.

    samples, divisor = weigh(samples, "token_mean", 0.0)            # once a step, over all ranks' samples
    plan = plan_batch(samples, dp=2, microbatch_tokens=8192)
    for microbatch in plan.ranks[rank]: pack(microbatch)            # every rank has the same number of microbatches

Pure: `plan_batch` is a function of the set of samples alone, so every rank makes the same plan by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl360.bus.blobs import digest_of
from rl360.bus.sample import Routing, Sample, decode, decode_routing
from rl360.sessions.routing import RoutingShape
from rl360.trainer.expert_rows import expert_rows, pack_rows
from rl360.trainer.reduction import Reduction, token_weights

EMPTY_TOKENS = 2
"""Length of the weightless sequence that stands in for an empty microbatch: the shortest with a next token."""


class BatchError(ValueError):
    """A sample that can't be trained on as it is."""


@dataclass(frozen=True)
class TrainSample:
    """One branch of a kept attempt. `digest` is blake3 of the encoded sample, what `StepTrained.sample_digests` lists."""

    sample: Sample
    digest: str
    advantage: float
    routing: Routing | None = None
    weight: float = 1.0  # of each sampled token, before the step's divisor (S20); see `weigh`
    sampled: int = field(init=False)  # tokens the policy sampled

    def __post_init__(self) -> None:
        mask = self.sample.mask
        if len(mask) and mask[0]:
            raise BatchError(f"{self.attempt}/{self.branch}: the first token is marked as sampled; nothing precedes it to predict it")
        if not np.isfinite(self.advantage):
            raise BatchError(f"{self.attempt}/{self.branch}: advantage is {self.advantage}")
        object.__setattr__(self, "sampled", int(np.count_nonzero(mask)))

    @property
    def attempt(self) -> str:
        return self.sample.attempt

    @property
    def branch(self) -> int:
        return self.sample.branch

    def __len__(self) -> int:
        return len(self.sample)


def train_sample(data: bytes, *, advantage: float, routing: bytes | None = None, weight: float = 1.0) -> TrainSample:
    """Read an encoded sample (the bytes of `TrajectoryMerged.sample`). Raises SampleError or BatchError."""
    return TrainSample(decode(data), digest_of(data), advantage, None if routing is None else decode_routing(routing), weight)


def weigh(samples: Sequence[TrainSample], reduction: Reduction, constant: float = 0.0) -> tuple[tuple[TrainSample, ...], float]:
    """The step's samples with their token weights, and the step's divisor (S20). Raises ReductionError when there is none."""
    result = token_weights(samples, reduction, constant)
    return tuple(replace(s, weight=w) for s, w in zip(samples, result.weights, strict=True)), result.divisor


class Placed(Protocol):
    """What a plan needs to know of a sample. Rank 0 plans with names and lengths; each rank reads its own samples (CASES 26)."""

    @property
    def attempt(self) -> str: ...

    @property
    def branch(self) -> int: ...

    def __len__(self) -> int:
        """Tokens."""
        ...


S = TypeVar("S", bound=Placed)


@dataclass(frozen=True)
class Microbatch(Generic[S]):
    """Samples that go through the model in one pass. An empty one keeps ranks in step and changes nothing."""

    samples: tuple[S, ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))


@dataclass(frozen=True)
class BatchPlan(Generic[S]):
    """`ranks[r][m]`: microbatch m of data-parallel rank r. All ranks have `microbatches` of them."""

    ranks: tuple[tuple[Microbatch[S], ...], ...]

    @property
    def microbatches(self) -> int:
        return len(self.ranks[0])


def plan_batch(samples: Sequence[S], *, dp: int, microbatch_tokens: int) -> BatchPlan[S]:
    """Spread samples over ranks, balanced by tokens, and over microbatches of at most `microbatch_tokens` (S21).

    Fewer samples than ranks give empty microbatches; no sample gives no microbatch. A sample longer than the bound is
    alone in its microbatch: it is never cut.
    """
    longest_first = sorted(samples, key=lambda s: (-len(s), s.attempt, s.branch))
    loads: list[list[S]] = [[] for _ in range(dp)]
    tokens = [0] * dp
    for sample in longest_first:
        rank = min(range(dp), key=tokens.__getitem__)
        loads[rank].append(sample)
        tokens[rank] += len(sample)
    filled = [_fill(load, microbatch_tokens) for load in loads]
    rounds = max(map(len, filled))
    return BatchPlan(tuple(tuple(bins) + tuple(Microbatch[S](()) for _ in range(rounds - len(bins))) for bins in filled))


def _fill(longest_first: Sequence[S], bound: int) -> list[Microbatch[S]]:
    """First fit."""
    bins: list[list[S]] = []
    room: list[int] = []
    for sample in longest_first:
        i = next((i for i, left in enumerate(room) if left >= len(sample)), len(bins))
        if i == len(bins):
            bins.append([])
            room.append(bound)
        bins[i].append(sample)
        room[i] -= len(sample)
    return [Microbatch(tuple(b)) for b in bins]


@dataclass(frozen=True)
class PackedBatch:
    """One microbatch in THD layout: sequences one after another, T tokens in all, S sequences.

    Row t of the arrays below `targets` is about token t + 1 of the same sequence, what the model predicts at t; the last row
    of a sequence predicts nothing (mask False, weight 0).
    """

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], from 0 in each sequence
    cu_seqlens: Tensor  # int32 [S + 1], starts of the sequences and T
    targets: Tensor  # int64 [T], the next token; 0 in a last row
    mask: Tensor  # bool [T], the target was sampled by the policy (S6)
    sampler_logprobs: Tensor  # float32 [T], of the target when it was sampled; 0 where mask is False
    versions: Tensor  # int32 [T], policy version that sampled the target; -1 where mask is False
    advantages: Tensor  # float32 [T]; 0 where mask is False
    weights: Tensor  # float32 [T], token weight (S20); 0 where mask is False
    lengths: tuple[int, ...]  # of the sequences, on the host
    samples: tuple[TrainSample, ...]  # in the order of the sequences, before weightless ones; () for an empty microbatch
    recorded: Tensor  # bool [T], a sample's token with an expert row: all but the last of a sequence
    experts: Tensor | None = None  # uint8 or int16 [T, MoE layers, topk], to be replayed (S11)

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    def routed_freely(self) -> PackedBatch:
        """The same batch without recorded experts."""
        return replace(self, experts=None)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        moved = {name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, name := f.name), Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Replay:
    """Recorded experts that ride along: their shape in a sample, and the MoE layers that are wanted of it."""

    shape: RoutingShape
    layers: slice = field(default_factory=lambda: slice(None))


def pack(microbatch: Microbatch[TrainSample], replay: Replay | None = None, multiple: int = 1) -> PackedBatch:
    """Tensors of one microbatch, on the CPU. Order of sequences = order of samples.

    One weightless sequence at the end makes the tokens a multiple of `multiple`. Raises ReplayError when a sample's experts don't fit.
    """
    samples = microbatch.samples
    lengths = [len(s) for s in samples] or [EMPTY_TOKENS]
    if padding := -sum(lengths) % multiple:
        lengths.append(padding)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(cu[-1])
    ids = _joined([s.sample.ids for s in samples], np.int64, total)
    mask = _shifted([s.sample.mask for s in samples], np.bool_, total, fill=0)
    factors = [(s.advantage, s.weight) for s in samples]
    factors += [(0.0, 0.0)] * (len(lengths) - len(factors))
    per_token = np.repeat(np.array(factors, np.float32), lengths, axis=0)
    per_token[~mask] = 0
    return PackedBatch(
        ids=torch.as_tensor(ids),
        positions=torch.as_tensor(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])),
        cu_seqlens=torch.as_tensor(cu),
        targets=torch.as_tensor(_shifted([s.sample.ids for s in samples], np.int64, total, fill=0)),
        mask=torch.as_tensor(mask),
        sampler_logprobs=torch.as_tensor(_shifted([s.sample.logprobs for s in samples], np.float32, total, fill=0)),
        versions=torch.as_tensor(_shifted([s.sample.versions for s in samples], np.int32, total, fill=-1)),
        advantages=torch.as_tensor(per_token[:, 0].copy()),
        weights=torch.as_tensor(per_token[:, 1].copy()),
        lengths=tuple(lengths),
        recorded=torch.as_tensor(_shifted([np.ones(len(s), np.bool_) for s in samples], np.bool_, total, fill=0)),
        samples=samples,
        experts=None if replay is None else _experts(samples, lengths, replay),
    )


def _experts(samples: Sequence[TrainSample], lengths: Sequence[int], replay: Replay) -> Tensor:
    rows = [expert_rows(s.sample, s.routing, replay.shape)[:, replay.layers] for s in samples]
    return torch.as_tensor(pack_rows(rows, lengths, replay.shape, replay.layers))


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.generic], total: int) -> np.ndarray:
    out = np.zeros(total, dtype)
    start = 0
    for a in arrays:
        out[start : start + len(a)] = a
        start += len(a)
    return out


def _shifted(arrays: Sequence[np.ndarray], dtype: type[np.generic], total: int, *, fill: int) -> np.ndarray:
    """Each array one place to the left, `fill` in its last place and in what is left."""
    out = np.full(total, fill, dtype)
    start = 0
    for a in arrays:
        out[start : start + len(a) - 1] = a[1:]
        start += len(a)
    return out
