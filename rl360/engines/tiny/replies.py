"""The contract's replies of finished and running requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rl360.engines.contract import ChunkMeta, FinishReason, GenerateChunk, GenerateReply, GenerateRequest, MetaInfo
from rl360.engines.tiny.requests import Request
from rl360.engines.tiny.shape import ModelError


class Texts:
    """Text of output ids: the model folder's tokenizer, or empty texts when it has none. Nothing decides by it (S1)."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._tokenizer: Any = None  # the library has no types
        if path.exists():
            try:
                self._tokenizer = Tokenizer.from_str(path.read_text())
            except (OSError, ValueError) as e:
                raise ModelError(f"{path}: can't be read as a tokenizer: {e}") from None

    def of(self, ids: list[int], asked: GenerateRequest, finish: FinishReason | None) -> str:
        """The stop token is trimmed from the text alone, unless `no_stop_trim`."""
        if self._tokenizer is None:
            return ""
        params = asked.sampling_params
        if finish is not None and finish.type == "stop" and not params.no_stop_trim:
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)


def reply(request: Request, asked: GenerateRequest, texts: Texts, generation: str) -> GenerateReply:
    """Reply of a request that has ended."""
    assert request.finish is not None, "only a finished request has a reply"
    output = request.output
    return GenerateReply(
        text=texts.of(output, asked, request.finish),
        output_ids=output,
        meta_info=MetaInfo(
            finish_reason=request.finish,
            e2e_latency=request.finished - request.received,
            request_finished_ts=request.finished,
            routed_experts=request.experts,
            kv_versions=request.kv_versions,
            **_shared(request, asked, generation),
        ),
        prompt_token_ids=request.ids[: request.prompt] if asked.return_prompt_token_ids else None,
    )


def chunk(request: Request, asked: GenerateRequest, texts: Texts, generation: str) -> GenerateChunk:
    """What has been sampled so far, cumulative. Called between two steps, by the engine's thread."""
    output = request.output
    meta = ChunkMeta(finish_reason=None, **_shared(request, asked, generation))
    return GenerateChunk(text=texts.of(output, asked, None), output_ids=output, meta_info=meta)


def _shared(request: Request, asked: GenerateRequest, generation: str) -> dict[str, Any]:
    rows = zip(request.logprobs, request.output, strict=True) if asked.return_logprob else ()
    return {
        "id": request.rid,
        "prompt_tokens": request.prompt,
        "completion_tokens": len(request.logprobs),
        "cached_tokens": request.cached or 0,
        "weight_version": request.versions[-1][0] if request.versions else "",
        "num_retractions": request.retractions,
        "output_token_logprobs": [(logprob, token, None) for logprob, token in rows],
        "weight_versions": request.spans(),
        "request_received_ts": request.received,
        "forward_entry_time": request.entered,
        "prefill_finished_time": request.prefilled,
        "queue_time": max(0.0, request.entered - request.received),
        "generation": generation,
    }
