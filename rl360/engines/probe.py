"""What a run needs of an engine, proven on the engine itself before it joins (S1, S3, S9, S10; CASES 23, 31).

Each check is one capability; a missing one is refused by its name. Sampling is greedy and a few tokens long; the cache is flushed after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch

from rl360.bus.events import Boundary, Cause
from rl360.config import Config
from rl360.engines import contract as c
from rl360.engines.client import EngineClient, EngineError
from rl360.engines.dialect import Dialect
from rl360.engines.holdings import Sums, differences, sums_of
from rl360.engines.sglang.checkpoint import Checkpoint
from rl360.engines.sglang.layout import held_by
from rl360.sessions import routing
from rl360.sessions.routing import NO_ROWS, RoutingError, RoutingShape, shape_of
from rl360.sessions.sampled import EngineReply, Refused, check

_PROMPT: Final = 12  # tokens
_TOKENS: Final = 4
_TURN: Final = 5  # the first row that a second turn would ask for


class MissingCapability(EngineError):
    """An engine that serves, but lacks what this run needs. The message names it."""

    def __init__(self, generation: str, capability: str, detail: str) -> None:
        super().__init__(Boundary.ENGINE, Cause.REFUSED, f"{capability}: {detail}", generation=generation)
        self.capability = capability


class Probe:
    """Checks of one engine against one recipe. `label`: the version that it must say it holds."""

    def __init__(self, client: EngineClient, config: Config, label: str) -> None:
        self._client, self._config, self._label = client, config, label
        model: dict[str, Any] = msgspec.json.decode((config.policy.folder / "config.json").read_bytes())
        every_layer = config.engine.kind == "sglang"
        self._shape = shape_of(model, every_layer=every_layer) if config.engine.routed_experts else None
        self._ids = [(7 * i + 3) % int(model["vocab_size"]) for i in range(_PROMPT)]

    async def prove(self) -> Dialect:
        """Raises MissingCapability, or EngineError when a call fails."""
        dialect = await self._client.dialect()
        await self._context()
        await self._version()
        await self._tokens()
        if self._shape is not None:
            await self._routing(self._shape)
        await self._weights(dialect)
        await self._client.flush()
        return dialect

    async def _context(self) -> None:
        info, needed = await self._client.server_info(), self._config.sampling.context
        if info.max_req_input_len < needed - 1:
            raise self._missing("context", f"it takes {info.max_req_input_len} tokens, sampling.context is {needed}")

    async def _version(self) -> None:
        held = (await self._client.model_info()).weight_version
        if held != self._label:
            raise self._missing("weight version", f"it says that it holds {held!r}, it was started with {self._label!r}")

    async def _tokens(self) -> None:
        """The prompt's echo, finite log-probs of every token, and the version, by the rules that a turn must meet."""
        try:
            reply = await self._sample("probe.tokens.")
        except EngineError as e:
            if e.cause is not Cause.UNKNOWN:
                raise
            raise self._missing("tokens and log-probs", e.detail) from None  # a log-prob that is no number comes as null
        prompt = ",".join(map(str, self._ids)).encode()
        echo = msgspec.Raw(msgspec.json.encode(reply.prompt_token_ids))
        try:
            as_turn = EngineReply(output_ids=reply.output_ids, meta_info=reply.meta_info, prompt_token_ids=echo)
            check(as_turn, prompt=prompt, prompt_tokens=len(self._ids), min_version=0)
        except Refused as e:
            raise self._missing("tokens and log-probs", str(e)) from None

    async def _routing(self, shape: RoutingShape) -> None:
        """Rows for all tokens but the last, and the same ones from a later row on."""
        whole = await self._rows("probe.rows.", 0, shape)
        later = await self._rows("probe.later.", _TURN, shape)
        if not (whole[_TURN:] == later).all():
            raise self._missing("routed experts", f"rows from {_TURN} on differ from the same rows of a whole reply")

    async def _rows(self, rid: str, start: int, shape: RoutingShape) -> routing.Rows:
        reply = await self._sample(rid, start)
        if not reply.meta_info.routed_experts:
            raise self._missing("routed experts", NO_ROWS)
        try:
            rows = routing.decode(reply.meta_info.routed_experts, shape)
        except RoutingError as e:
            raise self._missing("routed experts", str(e)) from None
        due = len(self._ids) + len(reply.output_ids) - 1 - start
        if len(rows) != due:
            raise self._missing("routed experts", f"{len(rows)} rows where {due} were due from row {start} on")
        return rows

    async def _weights(self, dialect: Dialect) -> None:
        """Its checksums are those that the trainer can compute: else no push could ever be agreed."""
        held = await self._client.checksums()
        dtype: torch.dtype = getattr(torch, self._config.engine.dtype)
        names, expected = await asyncio.to_thread(_expected, Checkpoint(self._config.policy.folder, dtype), dialect)
        if wrong := differences([dict.fromkeys(rank, "") for rank in held], [dict.fromkeys(rank, "") for rank in names]):
            raise self._missing("weight checksums", f"it holds other parameters than the policy's layout has: {wrong}")
        compared = [{n: rank.get(n, "") for n in sums} for rank, sums in zip(held, expected, strict=True)]
        if wrong := differences(compared, expected):
            raise self._missing("weight checksums", f"its checksums of the policy can't be reproduced: {wrong}")

    async def _sample(self, rid: str, start: int | None = None) -> c.GenerateReply:
        request = c.GenerateRequest(
            input_ids=self._ids,
            sampling_params=c.SamplingParams(temperature=0.0, max_new_tokens=_TOKENS, ignore_eos=True),
            rid=rid,
            return_logprob=True,
            return_prompt_token_ids=True,
            return_routed_experts=start is not None,
            routed_experts_start_len=start or 0,
        )
        return await self._client.generate(request)

    def _missing(self, capability: str, detail: str) -> MissingCapability:
        return MissingCapability(self._client.generation, capability, detail)


def _expected(checkpoint: Checkpoint, dialect: Dialect) -> tuple[Sequence[dict[str, Any]], Sums]:
    """Names of all parameters of each rank, and the checksums of those that are compared."""
    shapes = checkpoint.shapes()
    if dialect.sums == "named":
        return [shapes], sums_of(checkpoint.checked(), dialect)
    names = [dict(held_by(shapes, rank=rank, tp=dialect.tp, ep=dialect.ep)) for rank in range(dialect.tp)]
    return names, sums_of(checkpoint.checked(), dialect)
