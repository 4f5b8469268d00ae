"""Demonstrations as the tokens that a session would hold, and batches of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rl360.config import Agent
from rl360.sessions.messages import Message, Tool
from rl360.sessions.templates import Template
from rl360.tiny import tokenizer as bpe
from rl360.tiny import traces
from rl360.tiny.shell_tasks import AnyTask
from rl360.tiny.traces import Sloppiness, demonstrate

BASH: Final = Tool(name=traces.TOOL, parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]})


@dataclass(frozen=True)
class Conversation:
    """`sampled[i]`: token i is the policy's own."""

    ids: list[int]
    sampled: list[bool]


def conversation(template: Template, task: AnyTask, messages: list[traces.Message]) -> Conversation:
    """The tokens that a session would hold after this attempt (S1)."""
    ids = template.render([Message(role="system", content=Agent().system), Message(role="user", content=task.instruction)], [BASH])
    sampled = [False] * len(ids)
    for m in messages:
        if m.role == "assistant":
            given, own = template.generation_prompt, [*template.tokenizer.encode_marked(m.content), bpe.IM_END]
        else:
            given, own = template.suffix([Message(role=m.role, content=m.content)]), []
        ids += [*given, *own]
        sampled += [False] * len(given) + [True] * len(own)
    return Conversation(ids, sampled)


def pool(
    template: Template, tasks: Iterator[AnyTask], rng: random.Random, sloppiness: Sloppiness, *, batch: int, batches: int = 8
) -> list[list[Conversation]]:
    """`batches` lists of `batch` conversations; those of like length share one, which saves padding."""
    drawn = [next(tasks) for _ in range(batch * batches)]
    conversations = [conversation(template, task, demonstrate(task, rng, sloppiness)) for task in drawn]
    conversations.sort(key=lambda c: len(c.ids))
    lists = [conversations[i * batch : (i + 1) * batch] for i in range(batches)]
    rng.shuffle(lists)
    return lists


def collate(conversations: list[Conversation], context_weight: float) -> tuple[Tensor, Tensor]:
    """ids [b, t] int64 padded with <|pad|>; weights [b, t] float32: 1 where sampled, 0 on padding, else `context_weight`."""
    width = max(len(c.ids) for c in conversations)
    ids = torch.full((len(conversations), width), bpe.PAD)
    weights = torch.zeros(len(conversations), width)
    for row, c in enumerate(conversations):
        ids[row, : len(c.ids)] = torch.tensor(c.ids)
        weights[row, : len(c.ids)] = torch.where(torch.tensor(c.sampled), 1.0, context_weight)
    return ids, weights
