"""What a request may ask for. Pure: says why one is refused, before anything is queued."""

from __future__ import annotations

from dataclasses import dataclass

from rl360.engines.contract import GenerateRequest


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the engine serves."""

    vocab: int
    context: int
    stop_ids: frozenset[int]


def refusal(request: GenerateRequest, limits: Limits) -> str:
    """Why the request is refused; empty: it isn't.

    An id out of the vocabulary would end the engine, a position past the context would be sampled from nonsense: neither is
    ever clamped.
    """
    ids, params = request.input_ids, request.sampling_params
    if not ids:
        return "input_ids cannot be empty."
    if (low := min(ids)) < 0 or max(ids) >= limits.vocab:
        bad = low if low < 0 else max(ids)
        return f"input_ids[{ids.index(bad)}] = {bad} is not in the vocabulary [0, {limits.vocab})"
    if params.max_new_tokens < 1:
        return f"max_new_tokens must be at least 1, is {params.max_new_tokens}"
    if (total := len(ids) + params.max_new_tokens) > limits.context:
        return (
            f"The input ({len(ids)} tokens) and max_new_tokens ({params.max_new_tokens}) make {total},"
            f" longer than the model's context length ({limits.context} tokens)."
        )
    return _sampling_refusal(request) or _experts_refusal(request)


def stops(request: GenerateRequest, limits: Limits) -> frozenset[int]:
    """Ids after which generation stops."""
    params = request.sampling_params
    return frozenset(params.stop_token_ids) | (frozenset[int]() if params.ignore_eos else limits.stop_ids)


def _sampling_refusal(request: GenerateRequest) -> str:
    params = request.sampling_params
    if not 0 <= params.temperature < float("inf"):
        return f"temperature must be 0 (greedy) or a positive number, is {params.temperature}"
    if params.top_p != 1.0 or params.top_k not in (-1, 0):
        return "top_p and top_k are not served here: the tiny engine samples from the whole vocabulary"
    return ""


def _experts_refusal(request: GenerateRequest) -> str:
    start = request.routed_experts_start_len
    if not request.return_routed_experts or 0 <= start <= len(request.input_ids):
        return ""
    return f"routed_experts_start_len={start} must lie between 0 and the number of input tokens ({len(request.input_ids)})"
