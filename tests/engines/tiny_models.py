"""Small random Qwen3 and Qwen3-MoE models in HF layout: transformers is the oracle of the tiny engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl360.engines.contract import FinishReason
from rl360.engines.tiny.batching import Scheduler
from rl360.engines.tiny.model import Model
from rl360.engines.tiny.requests import Request
from rl360.engines.tiny.shape import read_shape
from rl360.engines.tiny.weights import Weights, load_weights

torch.set_num_threads(1)

VOCAB = 96
EOS = 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


@dataclass(frozen=True)
class Oracle:
    """An HF model and the folder it was saved to."""

    model: Any
    folder: Path

    def logits(self, ids: list[int]) -> torch.Tensor:
        """fp32 logits [tokens, vocab]."""
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].float()

    def logprobs(self, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Log-prob of each output token after what came before it."""
        logp = torch.log_softmax(self.logits(prompt + output)[:-1] / temperature, -1)
        return logp.gather(-1, torch.tensor((prompt + output)[1:])[:, None])[len(prompt) - 1 :, 0]

    def experts(self, ids: list[int]) -> torch.Tensor:
        """Experts that the HF router picks [tokens, MoE layers, top-k]."""
        picked: list[torch.Tensor] = []
        gates = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        hooks = [gate.register_forward_hook(lambda _m, _i, out: picked.append(out[2])) for gate in gates]
        self.logits(ids)
        for hook in hooks:
            hook.remove()
        return torch.stack([p.view(len(ids), -1) for p in picked], 1)

    def named(self) -> dict[str, torch.Tensor]:
        """Weights as the engine names them."""
        return {k: v.clone() for k, v in load_weights(self.folder, read_shape(self.folder), torch.float32).named.items()}


def dense(folder: Path, seed: int = 0, *, tied: bool = True) -> Oracle:
    torch.manual_seed(seed)
    return _saved(Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=tied)), folder)


def moe(folder: Path, seed: int = 0, *, dense: tuple[int, ...] = (0,)) -> Oracle:
    """Two layers, those in `dense` without experts; like all of the kind, it has an output matrix of its own."""
    torch.manual_seed(seed)
    return _saved(Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **_EXPERTS, tie_word_embeddings=False, mlp_only_layers=list(dense))), folder)


def _saved(model: Any, folder: Path) -> Oracle:
    model.eval().save_pretrained(folder)
    return Oracle(model, folder)


def weights_of(oracle: Oracle, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(oracle.folder, read_shape(oracle.folder), dtype)


def model_of(oracle: Oracle, *, slots: int = 8, context: int = 128, capture: bool = False) -> Model:
    return Model(weights_of(oracle), slots=slots, context=context, capture_experts=capture)


class Bench:
    """A scheduler driven step by step, with no thread and no server."""

    def __init__(self, oracle: Oracle, *, slots: int = 8, capture: bool = False, seed: int = 0) -> None:
        self.done: dict[str, Request] = {}
        model = model_of(oracle, slots=slots, capture=capture)
        self.scheduler = Scheduler(model, version="0", seed=seed, on_finish=lambda r: self.done.update({r.rid: r}))
        self._count = 0

    def add(self, ids: list[int], max_new: int = 8, *, rid: str = "", stop: tuple[int, ...] = (), **more: Any) -> Request:
        self._count += 1
        request = Request(
            rid=rid or f"r{self._count}.",
            ids=list(ids),
            prompt=len(ids),
            max_new=max_new,
            stop=frozenset(stop),
            temperature=more.pop("temperature", 1.0),
            **more,
        )
        assert self.scheduler.submit(request)
        return request

    def run(self, steps: int = 1000) -> None:
        """Step until nothing is left to do, at most `steps` times."""
        for _ in range(steps):
            if not self.scheduler.runnable:
                return
            self.scheduler.step()

    def reply(self, ids: list[int], max_new: int = 8, **more: Any) -> Request:
        request = self.add(ids, max_new, **more)
        self.run()
        assert isinstance(request.finish, FinishReason)
        return request


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids, none of them the end token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(EOS + 1, VOCAB, (length,), generator=generator).tolist()
