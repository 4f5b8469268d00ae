"""Demonstrations: their outputs are a real shell's, and a session reads their calls as meant."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from rl360.config import Agent
from rl360.sessions.messages import Message
from rl360.sessions.templates import Template, get_template, load_tokenizer
from rl360.tiny import policy_folder
from rl360.tiny.conversations import BASH, conversation
from rl360.tiny.shell_tasks import RUN_TEST, SUBMIT, AnyTask, sample_tasks, write_task
from rl360.tiny.tokenizer import IM_END
from rl360.tiny.traces import CLEAN, FORMAT_ERROR, SLOPPY, Sloppiness, demonstrate, tool_call
from tests.tiny.shells import Shell


@pytest.fixture(scope="module")
def template() -> Template:
    return get_template("k2v3", load_tokenizer(policy_folder()))


def tasks(count: int) -> list[AnyTask]:
    return sample_tasks(seed=11, count=count, split="train")


@pytest.mark.parametrize("sloppiness", [CLEAN, SLOPPY])
def test_simulated_outputs_equal_real_ones(tmp_path: Path, template: Template, sloppiness: Sloppiness) -> None:
    rng = random.Random(0)
    for task in tasks(24):
        shell = Shell(write_task(tmp_path / "tasks" / task.name, task), tmp_path / "roots" / task.name)
        messages = demonstrate(task, rng, sloppiness)
        for said, answer in itertools.pairwise(messages):
            if answer.role == "tool":
                (call,) = template.parse_reply([*template.tokenizer.encode_marked(said.content), IM_END], [BASH]).tool_calls
                assert shell.run(call.arguments["command"]) == answer.content, (task, call)


def test_a_clean_demonstration_reads_edits_tests_and_submits() -> None:
    for task in tasks(9):
        said = [m.content for m in demonstrate(task, random.Random(0), CLEAN) if m.role == "assistant"]
        assert said == [tool_call(c) for c in (task.read, task.edit, RUN_TEST, SUBMIT)]


def test_a_session_refuses_exactly_the_malformed_calls(template: Template) -> None:
    rng, errors, calls = random.Random(1), 0, 0
    for task in tasks(120):
        messages = demonstrate(task, rng, SLOPPY)
        for said, answer in zip(messages, [*messages[1:], None], strict=True):
            if said.role == "assistant":
                malformed = answer is not None and answer.content == FORMAT_ERROR
                reply = template.parse_reply([*template.tokenizer.encode_marked(said.content), IM_END], [BASH])
                assert bool(reply.format_error) == malformed, (said, reply)
                errors, calls = errors + malformed, calls + 1
    assert 0 < errors < calls / 4


def test_s1_training_tokens_are_the_sessions_tokens(template: Template) -> None:
    """A clean demonstration rendered message by message as a session does equals one render of the whole."""
    task = tasks(1)[0]
    messages = demonstrate(task, random.Random(0), CLEAN)
    whole = [Message(role="system", content=Agent().system), Message(role="user", content=task.instruction)]
    for m in messages:
        said = template.parse_reply([*template.tokenizer.encode_marked(m.content), IM_END], [BASH]) if m.role == "assistant" else None
        whole.append(Message(role=m.role, content=said.content if said else m.content, tool_calls=said.tool_calls if said else ()))
    made = conversation(template, task, messages)
    assert made.ids == template.render(whole, [BASH])
    assert sum(made.sampled) == sum(len(template.tokenizer.encode_marked(m.content)) + 1 for m in messages if m.role == "assistant")


def test_demonstrations_are_deterministic() -> None:
    task = tasks(1)[0]
    assert demonstrate(task, random.Random(4), SLOPPY) == demonstrate(task, random.Random(4), SLOPPY)
