"""A generation in the engine: what was asked, what has been sampled so far, and the reply it becomes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rl360.engines.contract import FinishReason, WeightSpan

Notify = Callable[[], None]


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """Written by the engine's thread alone until `finish` is set; then read by the server."""

    rid: str
    ids: list[int]  # prompt, then what was sampled
    prompt: int  # tokens of the prompt
    max_new: int
    stop: frozenset[int]
    temperature: float
    experts_from: int | None = None  # first row of the expert choices asked for
    on_token: Notify | None = None  # called in the engine's thread after each token
    received: float = field(default_factory=time.time)

    slot: int = -1
    cached: int | None = None  # prompt tokens found in the cache at the first prefill
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])  # (version, first output token)
    kv_versions: list[WeightSpan] = field(default_factory=list[WeightSpan])
    experts: str | None = None
    retractions: int = 0
    entered: float = 0.0
    prefilled: float = 0.0
    finished: float = 0.0
    finish: FinishReason | None = None
    error: str = ""

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt :]

    def label(self, version: str) -> None:
        """Tokens sampled from now on are by `version`."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.logprobs)))

    def spans(self) -> list[WeightSpan]:
        """Versions of the output tokens: contiguous, none empty."""
        ends = [start for _, start in self.versions[1:]] + [len(self.logprobs)]
        return [WeightSpan(version=v, start=s, end=e) for (v, s), e in zip(self.versions, ends, strict=True) if e > s]

    def ended(self) -> FinishReason | None:
        """Why generation ends with the last sampled token, or None."""
        if self.ids[-1] in self.stop:
            return FinishReason(type="stop", matched=self.ids[-1])
        if len(self.logprobs) >= self.max_new:
            return FinishReason(type="length", length=self.max_new)
        return None


ABORTED = FinishReason(type="abort", message="Aborted")
