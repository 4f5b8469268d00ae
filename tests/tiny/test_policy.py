"""The shipped policy: small, in Hugging Face's layout, with the session's template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rl360.sessions.messages import Message, Tool
from rl360.sessions.prove import prove_append_only
from rl360.sessions.templates import Template, get_template, load_tokenizer
from rl360.tiny import policy_folder, tokenizer, warmstart
from rl360.tiny.conversations import BASH
from rl360.tiny.qwen3 import Qwen3, Shape
from rl360.tiny.shell_tasks import SUBMIT
from rl360.tiny.tokenizer import SPECIAL_TOKENS, VOCABULARY


@pytest.fixture(scope="module")
def template() -> Template:
    return get_template("k2v3", load_tokenizer(policy_folder()))


@pytest.fixture(scope="module")
def hf_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(policy_folder())


def test_the_shipped_policy_is_complete_and_below_2_mb() -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    files = {p.name: p.stat().st_size for p in policy_folder().iterdir()}
    assert set(files) == names
    assert sum(files.values()) < 2_000_000


def test_transformers_loads_it_with_equal_logits() -> None:
    torch.set_num_threads(1)
    oracle = AutoModelForCausalLM.from_pretrained(policy_folder(), dtype=torch.float32).eval()
    model = Qwen3(Shape(), seed=0)
    model.load_state_dict(load_file(policy_folder() / "model.safetensors"))
    ids = torch.randint(0, VOCABULARY, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), oracle(ids).logits, atol=2e-5, rtol=0)


def test_special_tokens_have_the_first_ids(template: Template) -> None:
    assert [template.tokenizer.special(t) for t in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    config = json.loads((policy_folder() / "config.json").read_text())
    assert (config["pad_token_id"], config["eos_token_id"]) == (0, 2)
    assert config["vocab_size"] == template.tokenizer.size == VOCABULARY
    assert VOCABULARY % 64 == 0


def test_the_tokenizer_keeps_every_text(template: Template) -> None:
    for text in ("naïve 日本 🎉\t\r\n", "12345", "  a  b", "x<|im_end|></tool_call>", "\x00\x7f"):
        assert template.tokenizer.decode(template.tokenizer.encode(text)) == text


def test_digits_are_single_tokens_and_the_submission_is_two(template: Template) -> None:
    encode = template.tokenizer.encode
    assert [template.tokenizer.decode([i]) for i in encode("1234567")] == list("1234567")
    assert len(encode(SUBMIT)) == 2


CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "You are a coding agent."}, {"role": "user", "content": "a\nb "}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "ok"},
        {"role": "tool", "content": ""},
    ],
]
EDIT = Tool(name="edit", parameters={"type": "object", "properties": {"path": {}, "text": {}}})


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [[], [BASH], [BASH, EDIT]])
def test_the_jinja_template_equals_k2v3(
    template: Template, hf_tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], tools: list[Tool]
) -> None:
    ours = template.render([Message(role=m["role"], content=m["content"]) for m in messages], tools)  # type: ignore[arg-type]
    offered = [t.openai() for t in tools] or None
    theirs = hf_tokenizer.apply_chat_template(messages, tools=offered, add_generation_prompt=True, return_dict=False)
    assert theirs == [*ours, *template.generation_prompt]


def test_the_jinja_template_writes_tool_calls_as_k2v3_does(template: Template, hf_tokenizer: PreTrainedTokenizerFast) -> None:
    call = template.parse_reply(
        template.tokenizer.encode_marked('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    )
    messages = [
        {"role": "user", "content": "list"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}],
        },
    ]
    ours = template.render([Message(role="user", content="list"), Message(role="assistant", tool_calls=call.tool_calls)])
    assert hf_tokenizer.apply_chat_template(messages, return_dict=False) == ours


def test_s2_the_template_only_appends(template: Template) -> None:
    prove_append_only(template)


def test_the_shipped_tokenizer_is_the_one_that_warm_start_makes() -> None:
    shipped = json.loads((policy_folder() / "tokenizer.json").read_text())
    assert json.loads(tokenizer.train(warmstart.corpus(0)).to_str()) == shipped


def test_warm_start_is_deterministic_and_writes_a_loadable_policy(tmp_path: Path) -> None:
    recipe = warmstart.Recipe(steps=4, batch=2, report_every=2)
    lines: list[str] = []
    for name in ("a", "b"):
        warmstart.main(tmp_path / name, seed=3, recipe=recipe, report=lines.append)
    files = {p.name for p in policy_folder().iterdir()}
    assert {p.name for p in (tmp_path / "a").iterdir()} == files
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in files)
    assert any("step 2/4" in line for line in lines)
