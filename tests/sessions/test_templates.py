"""S2: a template is admitted only when it appends and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.sessions.jinja import JinjaTemplate
from rl360.sessions.messages import Message, Tool, ToolCall
from rl360.sessions.prove import admit, prove_append_only
from rl360.sessions.templates import TemplateError, get_template, load_tokenizer
from tests.sessions.tokens import SPECIALS, policy_folder, tokenizer

BASH = Tool(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]})
SYSTEM = Message(role="system", content="Be brief.")
USER = Message(role="user", content="list files")
CALL = Message(role="assistant", tool_calls=(ToolCall(name="bash", arguments={"command": "ls"}),))

APPEND_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEWLINE = APPEND_ONLY.replace("<|im_end|>{% endfor %}{% if", "<|im_end|>\n{% endfor %}{% if")
LAST = APPEND_ONLY.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and not loop.last %}{{ m.content | upper }}{% else %}{{ m.content }}{% endif %}"
)


def text(ids: list[int]) -> str:
    return tokenizer().decode(ids)


def test_k2v3_is_the_documented_format() -> None:
    t = get_template("k2v3", tokenizer())
    tool = Message(role="tool", content="a.py")
    ids = t.render([SYSTEM, USER, CALL, tool, tool], [BASH]) + t.generation_prompt
    assert text(ids) == (
        "<|im_start|>system\nBe brief.\nTools: bash(command)<|im_end|><|im_start|>user\nlist files<|im_end|>"
        '<|im_start|>assistant\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
        "<|im_start|>tool\na.py<|im_end|><|im_start|>tool\na.py<|im_end|><|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["k2v3", "qwen3"])
def test_s2_fixed_templates_are_proven(name: str) -> None:
    prove_append_only(get_template(name, tokenizer()))


def test_s2_qwen3_puts_the_newline_at_the_head_of_the_next_message() -> None:
    t = get_template("qwen3", tokenizer())
    stored = t.render([SYSTEM, USER]) + t.generation_prompt + t.reply_ids(CALL)
    assert text(stored).endswith("</tool_call><|im_end|>")
    assert text(t.suffix([Message(role="tool", content="x")])) == "\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>"


def test_case17_parallel_tool_results_are_rendered_as_one() -> None:
    t = get_template("qwen3", tokenizer())
    results = [Message(role="tool", content="x"), Message(role="tool", content="y")]
    assert text(t.suffix(results)).count("<|im_start|>") == 1
    assert text(t.suffix([*results, USER])).count("<|im_start|>") == 2


def test_s2_special_token_text_in_content_stays_plain_text() -> None:
    for name in ("k2v3", "qwen3"):
        t = get_template(name, tokenizer())
        nasty = Message(role="user", content="".join(SPECIALS))
        call = Message(role="assistant", tool_calls=(ToolCall(name="bash", arguments={"command": "echo '<|im_end|></tool_call>'"}),))
        ids = t.render([nasty, call])
        assert text(ids).count("<|im_end|>") == 4
        assert ids.count(tokenizer().special("<|im_end|>")) == 2
        assert t.parse_reply(t.reply_ids(call)).tool_calls == call.tool_calls


@given(st.text(), st.text(), st.dictionaries(st.text(max_size=5), st.text(), max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_canonical_reply_reads_back(content: str, name: str, arguments: dict[str, str]) -> None:
    t = get_template("k2v3", tokenizer())
    message = Message(role="assistant", content=content, tool_calls=(ToolCall(name=name, arguments=arguments),))
    reply = t.parse_reply(t.reply_ids(message))
    assert (reply.content, reply.tool_calls, reply.format_error) == (content, message.tool_calls, "")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>', "not JSON"),
        ('<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>', "unknown tool"),
        ('<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>', "lacks command"),
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n', "pair up"),
        ('{"name": "bash", "arguments": {"command": "ls"}}', "needs its tags"),
        ("<tool_call>\n[1]\n</tool_call>", "not an object"),
        ('<tool_call>\n{"name": "bash"}\n</tool_call>', '"arguments"'),
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call> and', "text after"),
        ("</tool_call>", "pair up"),
    ],
)
def test_format_errors_keep_the_whole_reply_as_text(reply: str, error: str) -> None:
    tk = tokenizer()
    got = get_template("k2v3", tk).parse_reply([*tk.encode_marked(reply), tk.special("<|im_end|>")], [BASH])
    assert error in got.format_error
    assert got.content == reply
    assert not got.tool_calls


def test_a_reply_without_a_call_is_no_format_error() -> None:
    tk = tokenizer()
    assert get_template("k2v3", tk).parse_reply(tk.encode("done"), [BASH]).format_error == ""


def test_a_tag_spelled_letter_by_letter_is_text() -> None:
    tk = tokenizer()
    spelled = tk.encode('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    got = get_template("k2v3", tk).parse_reply(spelled, [BASH])
    assert got.format_error
    assert not got.tool_calls


def test_s2_an_append_only_jinja_template_is_admitted(tmp_path) -> None:
    template = admit("jinja", load_tokenizer(policy_folder(tmp_path, chat_template=APPEND_ONLY)))
    assert text(template.suffix([USER])) == "<|im_start|>user\nlist files<|im_end|>"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (NEWLINE, "never sampled"),
        (LAST, "renders differently"),
        (NEWLINE.replace("m.content", "m.content | trim if loop.last else m.content", 1), "renders differently"),
    ],
)
def test_s2_qwen3s_own_faults_are_refused_with_the_remedy(tmp_path, source: str, why: str) -> None:
    with pytest.raises(TemplateError, match=why) as e:
        admit("jinja", load_tokenizer(policy_folder(tmp_path, chat_template=source)))
    assert 'sessions.template = "qwen3"' in str(e.value)


def test_s2_the_refusal_names_the_first_diverging_message_and_token() -> None:
    by_place = APPEND_ONLY.replace(
        "{{ m.content }}", "{{ m.content | upper if m.role == 'user' and loop.index < messages | length - 2 else m.content }}"
    )
    with pytest.raises(TemplateError, match=r"conversation \d+, message \d+ \(\w+\): .*token \d+ is '.*', expected '.*'"):
        prove_append_only(JinjaTemplate(by_place, tokenizer()))


def test_s2_a_jinja_template_that_spells_content_into_special_tokens_is_caught() -> None:
    ids = JinjaTemplate(APPEND_ONLY, tokenizer()).render([Message(role="user", content="<|im_end|>\ue0000\ue001")])
    assert ids.count(tokenizer().special("<|im_end|>")) == 1
    assert "<|im_end|>\ue0000\ue001<|im_end|>" in text(ids)


@pytest.mark.parametrize(("content", "why"), [("{% if %}", "line 1"), ("{{ raise_exception('no system role') }}", "no system role")])
def test_a_broken_jinja_template_is_refused(tmp_path, content: str, why: str) -> None:
    with pytest.raises(TemplateError, match=why):
        admit("jinja", load_tokenizer(policy_folder(tmp_path, chat_template=content)))


def test_a_missing_or_broken_tokenizer_names_the_file(tmp_path) -> None:
    with pytest.raises(TemplateError, match=r"tokenizer\.json: can't be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TemplateError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(TemplateError, match="unknown chat template 'k3'"):
        get_template("k3", tokenizer())
