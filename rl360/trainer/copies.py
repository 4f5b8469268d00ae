"""Copies of past weights by policy version: the old actor of `keep_old_actor` (S22), and the reference of a KL term.

The trainer computes log-probs under the weights that sampled a token by putting that version's copy into the model for one pass.
Copies lie in host memory, or on the trainer's own device where there is room (`trainer.copies`). Staleness is bounded (S24), so
`limit` = max_staleness + 1 of them are enough, however many steps lie between two pushes (`push.every`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from rl360.trainer.batch import PackedBatch


class CopyError(LookupError):
    """The weights of a version are no longer held."""


class Scorer(Protocol):
    """What computes log-probs with weights that can be replaced."""

    def parameters(self) -> Iterator[tuple[str, Tensor]]: ...

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]: ...


class WeightCopies:
    """Weights by version, the oldest forgotten first."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit, self._device = limit, device
        self._held: OrderedDict[int, dict[str, Tensor]] = OrderedDict()

    def __contains__(self, version: int) -> bool:
        return version in self._held

    @property
    def versions(self) -> list[int]:
        return sorted(self._held)

    def weights(self, version: int) -> Mapping[str, Tensor]:
        """Raises KeyError when the version isn't held."""
        return self._held[version]

    def hold(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights of `version`; forget the oldest beyond the limit."""
        if self.limit == 0:
            return
        self._held[version] = {name: w.detach().to(self._device, copy=True) for name, w in weights}
        while len(self._held) > self.limit:
            del self._held[min(self._held)]

    def logprobs(self, policy: Scorer, batches: Sequence[PackedBatch], versions: Iterable[int]) -> list[Tensor]:
        """Log-probs of each microbatch's targets, each under the version that sampled it, float32 [T]; 0 where none of `versions` did.

        All ranks give the same `versions`. Raises CopyError when one isn't held.
        """
        scores = [torch.zeros_like(batch.sampler_logprobs) for batch in batches]
        for version in sorted(versions):
            with self._in_place(policy, version):
                for score, batch, logprobs in zip(scores, batches, policy.logprobs(batches), strict=True):
                    of_version = batch.versions == version
                    score[of_version] = logprobs.to(score.device)[of_version]
        return scores

    def score(self, policy: Scorer, batches: Sequence[PackedBatch], version: int) -> list[Tensor]:
        """Log-probs of all sampled targets under `version`, whoever sampled them."""
        with self._in_place(policy, version):
            return policy.logprobs(batches)

    @contextmanager
    def _in_place(self, policy: Scorer, version: int) -> Generator[None]:
        if version not in self._held:
            raise CopyError(
                f"weights of version {version} are not held (held: {self.versions}): tokens of that version can't be scored with "
                f'trainer.old_policy = "keep_old_actor"; lower trainer.max_staleness or keep the checkpoints of the run'
            )
        own = {name: w.detach().clone() for name, w in policy.parameters()}
        _put(policy, self._held[version])
        try:
            yield
        finally:
            _put(policy, own)


def _put(policy: Scorer, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in policy.parameters():
            parameter.copy_(weights[name])
