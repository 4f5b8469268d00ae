"""A small byte-level BPE with the special tokens of the starting policy."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rl360.sessions.templates import Tokenizer

SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TEXT = [
    "You are a coding agent. Use the bash tool.\nTools: bash(command)",
    'system user assistant tool\n{"name": "bash", "arguments": {"command": "cat calc.py"}}\n',
    "In calc.py add(a, b) must return the sum. Fix it. Test: sh test.sh (no output) PASS FAIL",
]


@cache
def definition() -> str:
    tk = tokenizers.Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tk.train_from_iterator(
        TEXT * 20, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    )
    return tk.to_str()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(definition(), Path("test-policy"))


def policy_folder(path: Path, *, chat_template: str = "", **model: object) -> Path:
    """A folder with tokenizer.json (and a chat template): what a session server reads of a policy."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(definition())
    (path / "config.json").write_text(json.dumps({"vocab_size": 400, **model}))
    if chat_template:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    return path
