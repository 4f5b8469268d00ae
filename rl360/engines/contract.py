"""The part of SGLang's HTTP contract that RL360 uses, as types. Field names are SGLang's.

`POST /generate` carries token ids in and out; nothing else of a request decides what is sampled (S1).
The tiny CPU engine serves these types, the session server and the pusher send them.
Source: replies of SGLang 0.5.17 (H200) and 0.5.23 (CPU).
"""

from __future__ import annotations

from typing import Literal

import msgspec

# ------------------------------------------------------------------------------------------------ generate


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop_token_ids: list[int] = []
    no_stop_trim: bool = False
    skip_special_tokens: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`rid` names the request: idempotence and abort go by it, so rids are prefix-free."""

    input_ids: list[int]
    sampling_params: SamplingParams
    rid: str = ""
    return_logprob: bool = False
    return_prompt_token_ids: bool = False
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    stream: bool = False


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class WeightSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens [start, end) were sampled by `version`."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`output_token_logprobs` rows are [log-prob, token id, null]; `routed_experts` is base64 int32 (see FACTS in docs)."""

    id: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    num_retractions: int = 0
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_versions: list[WeightSpan] = []
    routed_experts: str | None = None
    e2e_latency: float = 0.0


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: list[int] | None = None


# ------------------------------------------------------------------------------------------------ control


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["abort", "retract", "in_place"]


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Matches every request whose rid starts with `rid`."""

    rid: str = ""
    abort_all: bool = False


class InitWeightsGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Join the collective group of one push plan as ranks [rank_offset, ...). Answers after the trainer joined."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class DestroyWeightsGroup(msgspec.Struct, frozen=True, kw_only=True):
    group_name: str


class UpdateFromDistributed(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket, broadcast by group rank 0 as one flat uint8 tensor (load_format "flattened_bucket")."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    flush_cache: bool = False
    weight_version: str | None = None
    load_format: str = "flattened_bucket"
    abort_all_requests: bool = False


class UpdateWeightVersion(msgspec.Struct, frozen=True, kw_only=True):
    new_version: str
    abort_all_requests: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True):
    success: bool
    message: str = ""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    weight_version: str
    served_model_name: str = ""
    model_type: str = ""
    is_generation: bool = True


class ChecksumRank(msgspec.Struct, frozen=True, kw_only=True):
    checksums: dict[str, str]


class ChecksumReply(msgspec.Struct, frozen=True, kw_only=True):
    success: bool
    message: str = ""
    ranks: list[ChecksumRank] = []
