"""Make the starting policy: supervised steps on demonstrations, clean ones first, then sloppy ones.

Exercises in copying are mixed in, more at the start: what the tasks need is to copy names and numbers from far above,
and so small a model finds that late from demonstrations alone.
A minute or two on one thread. The result is a folder in Hugging Face's layout.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save as safetensors
from torch import Tensor
from torch.nn import functional as F

from rl360.config import Agent
from rl360.sessions.templates import Template, get_template
from rl360.sessions.tokenizer import Tokenizer
from rl360.tiny import tokenizer as bpe
from rl360.tiny.conversations import Conversation, collate, pool
from rl360.tiny.qwen3 import Qwen3, Shape, hf_config
from rl360.tiny.shell_tasks import draw
from rl360.tiny.traces import CLEAN, SLOPPY, TOOL, demonstrate

Batch = tuple[Tensor, Tensor]  # ids [b, t] int64, loss weights [b, t] float32


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`clean`: share of the steps on clean demonstrations. `copying`: share of exercises at the start, falling to 0.

    `context_weight`: loss weight of tokens that aren't the policy's own.
    """

    steps: int = 600
    batch: int = 16
    lr: float = 3e-3
    warmup: int = 50
    decay_from: float = 0.6
    lr_floor: float = 0.1
    clean: float = 0.4
    copying: float = 0.3
    context_weight: float = 0.1
    report_every: int = 100


def main(out: Path, seed: int, *, recipe: Recipe | None = None, report: Callable[[str], None] = print) -> None:
    """Train a policy and write it into `out`; the seed decides every draw. Raises OSError at once when `out` can't be a folder."""
    out.mkdir(parents=True, exist_ok=True)  # what can't be written is found before the minutes, not after them
    torch.set_num_threads(1)
    recipe = recipe or Recipe()
    tokenizer = bpe.train(corpus(seed))
    template = get_template("k2v3", Tokenizer(tokenizer.to_str(), out))
    model = Qwen3(Shape(), seed)
    report(f"warm start: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {recipe.steps} steps")
    train(model, template, seed, recipe, report)
    save(out, model, tokenizer)
    report(f"warm start: written to {out}")


def corpus(seed: int, demonstrations: int = 1500) -> Iterator[str]:
    """Text to learn the BPE from: what stands between the special tokens of demonstrations."""
    rng = random.Random(f"corpus {seed}")
    tasks = draw(rng, "train")
    for _ in range(demonstrations):
        task = next(tasks)
        yield f"system\n{Agent().system}\nTools: {TOOL}(command)"
        yield f"user\n{task.instruction}"
        for message in demonstrate(task, rng, SLOPPY):
            yield f"{message.role}\n"
            yield message.content.removeprefix("<tool_call>").removesuffix("</tool_call>")


def train(model: Qwen3, template: Template, seed: int, recipe: Recipe, report: Callable[[str], None]) -> None:
    """`recipe.steps` AdamW steps in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started = time.monotonic()
    for step, (ids, weights) in enumerate(_batches(template, seed, recipe)):
        for group in optimizer.param_groups:
            group["lr"] = _lr(recipe, step)
        loss = _loss(model, ids, weights)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % recipe.report_every == 0 or step + 1 == recipe.steps:
            report(f"warm start: step {step + 1}/{recipe.steps}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s")


def _batches(template: Template, seed: int, recipe: Recipe) -> Iterator[Batch]:
    rng = random.Random(f"demonstrations {seed}")
    generator = torch.Generator().manual_seed(seed)
    tasks = draw(rng, "train")
    ready: list[list[Conversation]] = []
    for step in range(recipe.steps):
        done = step / recipe.steps
        if rng.random() < recipe.copying * (1 - done):
            yield _copying(recipe.batch, template.tokenizer.size, generator)
            continue
        if not ready:
            ready = pool(template, tasks, rng, CLEAN if done < recipe.clean else SLOPPY, batch=recipe.batch)
        yield collate(ready.pop(), recipe.context_weight)


def _copying(rows: int, vocabulary: int, generator: torch.Generator, length: int = 40) -> Batch:
    """Random tokens, then the same again; the loss is on the second half, but for its first token."""
    once = torch.randint(len(bpe.SPECIAL_TOKENS), vocabulary, (rows, length), generator=generator)
    weights = torch.zeros(rows, 2 * length)
    weights[:, length + 1 :] = 1.0
    return torch.cat([once, once], 1), weights


def _lr(recipe: Recipe, step: int) -> float:
    done = step / recipe.steps
    decay = 1.0 if done < recipe.decay_from else max(recipe.lr_floor, (1 - done) / (1 - recipe.decay_from))
    return recipe.lr * min(1.0, (step + 1) / recipe.warmup) * decay


def _loss(model: Qwen3, ids_bt: Tensor, weights_bt: Tensor) -> Tensor:
    """Weighted mean of the cross entropy. What has no weight (padding) gets no logits."""
    weights_bt = weights_bt[:, 1:]
    weighted = weights_bt > 0
    weights = weights_bt[weighted]
    logits = model.logits(model.hidden(ids_bt[:, :-1])[weighted])
    return (F.cross_entropy(logits, ids_bt[:, 1:][weighted], reduction="none") * weights).sum() / weights.sum()


def save(out: Path, model: Qwen3, tokenizer: tokenizers.Tokenizer) -> None:
    """Write the policy in Hugging Face's layout into `out`, a folder."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    (out / "model.safetensors").write_bytes(safetensors(tensors, metadata={"format": "pt"}))
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": bpe.IM_END, "pad_token_id": bpe.PAD}
    for name, data in (("config.json", hf_config(model.shape, bpe.IM_END, bpe.PAD)), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(data, indent=2) + "\n")
    bpe.save(tokenizer, out, model.shape.context)
