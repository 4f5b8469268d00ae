"""The part of SGLang's HTTP contract that RL360 uses, as types. Field names are SGLang's.

`POST /generate` carries token ids in and out; nothing else of a request decides what is sampled (S1).
The tiny CPU engine serves these types, the session server and the pusher send them.
Source: replies of SGLang 0.5.17 (H200) and 0.5.23 (CPU).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

TORN: Final = "torn"
"""Version label of weights that an update is changing. No reply under it becomes a turn: the request is sent again."""

PauseMode = Literal["abort", "retract", "in_place"]

# ------------------------------------------------------------------------------------------------ generate


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Generation stops at `stop_token_ids` and at the model's own end token, unless `ignore_eos`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop_token_ids: list[int] = []
    no_stop_trim: bool = False
    skip_special_tokens: bool = False
    ignore_eos: bool = False


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


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class WeightSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens [start, end) were sampled by `version`."""

    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that the engine has nothing to say in are left out, as SGLang leaves them out."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    num_retractions: int = msgspec.field(default_factory=int)  # a factory: sent even when 0
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_versions: list[WeightSpan] = []
    routed_experts: str | None = None
    e2e_latency: float = 0.0
    request_received_ts: float = 0.0  # unix seconds, as all `_ts` and `_time`
    forward_entry_time: float = 0.0
    prefill_finished_time: float = 0.0
    request_finished_ts: float = 0.0
    queue_time: float = 0.0  # seconds
    kv_versions: list[WeightSpan] = []
    generation: str = ""


class MetaInfo(_Meta, frozen=True, kw_only=True):
    """What the engine says of one request.

    `output_token_logprobs` has a row [log-prob, token id, null] for each sampled token, the stop token included.
    `routed_experts` is base64 of little-endian int32 [prompt + completion - 1 - start, layers, top-k]: of MoE layers (tiny engine), or of
    all layers (SGLang; what it says at a dense one means nothing).
    `kv_versions` (tiny engine only) names the weights that wrote KV rows [start, end); empty: all by `weight_version`.
    `generation` (tiny engine only) is the life of the engine that answered.
    """

    finish_reason: FinishReason


class ChunkMeta(_Meta, frozen=True, kw_only=True):
    """`MetaInfo` of a streamed chunk: the reason is null until the last one."""

    finish_reason: FinishReason | None


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed reply. Text, ids and log-probs are cumulative."""

    text: str
    output_ids: list[int]
    meta_info: ChunkMeta


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: list[int] | None = None


# ------------------------------------------------------------------------------------------------ control


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a refused `/generate` (status 400)."""

    error: ErrorBody


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """In flight: ended as they are (`abort`), put back to be computed again (`retract`), frozen with their KV (`in_place`)."""

    mode: PauseMode


class PauseReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/pause_generation` and `/continue_generation`."""

    message: str
    status: str = "ok"


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Matches every request whose rid starts with `rid`."""

    rid: str = ""
    abort_all: bool = False


class InitWeightsGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Join a group of one push plan as ranks [rank_offset, ...), one a GPU. Answers after the trainer joined."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class DestroyWeightsGroup(msgspec.Struct, frozen=True, kw_only=True):
    group_name: str


class UpdateFromDistributed(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket, broadcast by group rank 0 as one flat uint8 tensor (load_format "flattened_bucket").

    The bytes are the tensors in the order of `names`, row-major, one after the other without padding.
    `flush_cache` recomputes KV of old weights; without it old rows live on and replies name them (`kv_versions`).
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    flush_cache: bool = True
    weight_version: str | None = None
    load_format: str = "flattened_bucket"
    abort_all_requests: bool = False


class ExpertPart(msgspec.Struct, frozen=True, kw_only=True):
    """What group rank `source` sends to GPU `gpu` of the engine: the tensors in the order of `names`, as in a bucket."""

    source: int
    gpu: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class UpdateExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts from the trainer ranks that hold them, each part one flat uint8 tensor from rank to rank (tiny engine only).

    A rank's parts arrive in the order of `parts`. Loaded as a bucket is, inside `/begin_weight_update` … `/end_weight_update`.
    """

    parts: list[ExpertPart]
    group_name: str


class UpdateFromTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Handles of tensors in memory that the engine can map: on its own host only. One payload for each TP rank.

    SGLang demands base64 of a pickle: `[(name, tensor)]`, each tensor reduced to a handle as torch.multiprocessing does it.
    It loads them through an unpickler that knows torch, builtins and its own types (`engines/shared_memory.py`).
    """

    serialized_named_tensors: list[str]
    flush_cache: bool = msgspec.field(default_factory=lambda: True)  # a factory: sent always
    weight_version: str | None = None


class UpdateWeightVersion(msgspec.Struct, frozen=True, kw_only=True):
    new_version: str
    abort_all_requests: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the weight calls; `success` false comes with status 400 and the reason."""

    success: bool
    message: str = ""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    weight_version: str
    served_model_name: str = ""
    model_type: str = ""
    is_generation: bool = True


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang answers all its server arguments; these are read (`engines/dialect.py`)."""

    model_path: str
    served_model_name: str
    max_total_num_tokens: int
    max_req_input_len: int
    version: str
    device: str = "cpu"
    tp_size: int = 1
    ep_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    enable_return_routed_experts: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the list that `/get_load` answers."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class ChecksumRequest(msgspec.Struct, frozen=True, kw_only=True):
    action: Literal["checksum"]


class ChecksumRank(msgspec.Struct, frozen=True, kw_only=True):
    """One TP rank, in the order of the ranks. SGLang names fused parameters, the tiny engine Hugging Face's."""

    checksums: dict[str, str]


class ChecksumReply(msgspec.Struct, frozen=True, kw_only=True):
    success: bool
    message: str = ""
    ranks: list[ChecksumRank] = []
