"""The weights of a policy as a push plan sees them, from its shape and layout alone: for a plan on paper. Pure."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Iterator

import torch

from rl360.config import Trainer
from rl360.engines.plan import ShardSpec
from rl360.engines.weights import shard_spec
from rl360.trainer import hf
from rl360.trainer.spec import ModelError, ModelSpec


def paper_shards(spec: ModelSpec, trainer: Trainer, dtype: str) -> Iterator[ShardSpec]:
    """Every weight by its Hugging Face name, in `dtype` ("bfloat16"); of an expert, the first rank that holds it.

    Ranks are numbered as megatron-core does: tensor, context and data parallel within a stage, then stages. A stage's experts are
    spread over its first `ep` ranks, and again over the next ones. What isn't an expert is sent by rank 0, which gathers it.
    Raises ModelError for experts that can't be spread so.
    """
    count = spec.experts.count if spec.experts else 0
    if count % trainer.ep:
        raise ModelError(f"trainer.ep = {trainer.ep} doesn't divide {count} experts")
    in_stage = trainer.tp * trainer.cp * trainer.dp
    for name in hf.names(spec):
        sparse = hf.of_experts(name)
        first = (hf.layer_of(name) or 0) // spec.stage_layers(trainer.pp) * in_stage
        parts = hf.split(name, torch.empty(hf.shape(name, spec), dtype=getattr(torch, dtype), device="meta"), spec)
        of_each = len(parts) // count if sparse else 1
        for i, (hf_name, part) in enumerate(zip(hf.hf_names(name, range(count)), parts, strict=True)):
            yield shard_spec(hf_name, part, rank=first + i // of_each // (count // trainer.ep) if sparse else 0)
