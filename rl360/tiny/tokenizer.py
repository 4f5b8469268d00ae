"""The starting policy's own small BPE, learned from its demonstrations' text.

Ids 0 to 4 are <|pad|>, <|im_start|>, <|im_end|>, <tool_call>, </tool_call>. Every digit is a
token of its own: copying a number is then copying two of ten well-known tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, IM_START, IM_END, TOOL_CALL, TOOL_CALL_END = range(5)
SPECIAL_TOKENS: Final = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
VOCABULARY: Final = 640

# Digits, the fixed parts of a tool call's JSON, words with their space, line ends, runs of signs.
_PIECES: Final = r'\d|\{"name": "|", "arguments": \{"|": "|"\}\}| ?[A-Za-z_]+|\n| |[^\sA-Za-z0-9]+'

# The same text as rl360.sessions.templates' k2v3, for tools that read a policy folder.
CHAT_TEMPLATE: Final = r"""
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content if has_system else '' -%}
{%- if has_system or tools -%}
    {{- '<|im_start|>system\n' + system -}}
    {%- if tools -%}
        {{- ('\n' if system else '') + 'Tools: ' -}}
        {%- for tool in tools -%}
            {{- tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')' + ('' if loop.last else ', ') -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '\n' if message.content or not loop.first else '' -}}
        {{- '<tool_call>\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' + (call.function.arguments | tojson) -}}
        {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of `vocabulary` tokens over `texts`, which hold no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "eos_token": SPECIAL_TOKENS[IM_END],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.lstrip())
