"""Demonstrations for the starting policy: clean ones, and sloppy ones that leave something to learn.

Outputs of commands are simulated, equal to what a real shell prints (a test compares).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from rl360.tiny.shell_tasks import OPERATORS, PUBLIC_CASE, RUN_TEST, SUBMIT, AnyTask, FixTask, calculate, fix_edit, set_edit

TOOL: Final = "bash"
FORMAT_ERROR: Final = "error: invalid tool call"
NO_OUTPUT: Final = "(no output)"
TRIES: Final = 3


@dataclass(frozen=True)
class Message:
    """One message after the instruction. An assistant's content is exactly what the policy samples before <|im_end|>."""

    role: Literal["user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, kw_only=True)
class Sloppiness:
    """How often, in [0, 1], a demonstration does the wrong thing where it could."""

    format_error: float = 0.0  # before a command
    quit_after_error: float = 0.0  # submits at once after a format error
    skip_read: float = 0.0
    early: float = 0.0  # submits without an edit
    wrong: float = 0.0  # first edit
    wrong_again: float = 0.0  # later edits
    skip_test: float = 0.0
    give_up: float = 0.0  # submits after a failed test


CLEAN: Final = Sloppiness()
SLOPPY: Final = Sloppiness(
    format_error=0.1, quit_after_error=0.5, skip_read=0.3, early=0.2, wrong=0.2, wrong_again=0.25, skip_test=0.3, give_up=0.4
)


def demonstrate(task: AnyTask, rng: random.Random, sloppiness: Sloppiness) -> list[Message]:
    """One attempt at `task`, from the first reply of the assistant to the submission, which has no answer."""
    messages: list[Message] = []
    shell = SimulatedShell(task)
    plan = _plan(task, rng, sloppiness)
    output = None
    while (command := _next(plan, output)) is not None:
        if rng.random() < sloppiness.format_error:
            messages += [Message("assistant", malformed_call(command, rng)), Message("user", FORMAT_ERROR)]
            if rng.random() < sloppiness.quit_after_error:
                break
        output = shell.run(command)
        messages += [Message("assistant", tool_call(command)), Message("tool", output)]
    return [*messages, Message("assistant", tool_call(SUBMIT))]


def _next(plan: Generator[str, str, None], output: str | None) -> str | None:
    try:
        return next(plan) if output is None else plan.send(output)
    except StopIteration:
        return None


def _plan(task: AnyTask, rng: random.Random, sloppiness: Sloppiness) -> Generator[str, str, None]:
    """The commands of one attempt; each is answered with its output."""

    def chance(probability: float) -> bool:
        return rng.random() < probability

    seen = not chance(sloppiness.skip_read)
    if seen:
        yield task.read
    if chance(sloppiness.early):
        return
    for attempt in range(TRIES):
        if task.family == "look" and attempt and not seen:
            yield task.read
            seen = True
        guess = task.family == "look" and not seen
        mistake = chance(sloppiness.wrong_again if attempt else sloppiness.wrong)
        yield wrong_edit(task, rng) if guess or mistake else task.edit
        if chance(sloppiness.skip_test):
            return
        passed = (yield RUN_TEST) == "PASS"
        if passed or chance(sloppiness.give_up):
            return


def wrong_edit(task: AnyTask, rng: random.Random) -> str:
    """An edit of the right form that most often is wrong: another operator, a value seen nearby, a looser pattern."""
    if isinstance(task, FixTask):
        return fix_edit(task.target, task.names, rng.choice(list(OPERATORS.values())))
    if task.family == "look":
        return f"echo {rng.choice([*task.values.values(), rng.randint(10, 99)])} > {task.output}"
    if rng.random() < 0.5:
        return set_edit(task.target, task.setting.partition(".")[2], task.value)
    return set_edit(task.target, task.setting, rng.choice([task.values[task.setting], rng.randint(10, 99)]))


# ------------------------------------------------------------------------------------------------ tool calls


def tool_call(command: str) -> str:
    arguments = json.dumps({"name": TOOL, "arguments": {"command": command}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def malformed_call(command: str, rng: random.Random) -> str:
    """A call that a session refuses: a brace lost, a wrong tool, a wrong argument, or no end."""
    call = tool_call(command)
    return rng.choice(
        (
            call.replace("}}\n", "}\n"),
            call.replace('"bash"', '"shell"'),
            call.replace('"command"', '"cmd"'),
            call.replace("\n</tool_call>", ""),
        )
    )


# ------------------------------------------------------------------------------------------------ the simulated shell


class SimulatedShell:
    """The few commands that demonstrations use, over a task's files."""

    def __init__(self, task: AnyTask) -> None:
        self.task = task
        self.files = dict(task.files)

    def run(self, command: str) -> str:
        """What the agent sees: the stripped output, or "(no output)"."""
        return self._output(command).strip() or NO_OUTPUT

    def _output(self, command: str) -> str:
        if command == RUN_TEST:
            return public_result(self.task, self.files)
        if m := re.fullmatch(r"cat (\S+)", command):
            return self.files[m[1]]
        if m := re.fullmatch(r"grep (\S+) (\S+)", command):
            return "".join(line for line in self.files[m[2]].splitlines(keepends=True) if re.search(m[1], line))
        if m := re.fullmatch(r"echo (\S+) > (\S+)", command):
            self.files[m[2]] = f"{m[1]}\n"
            return ""
        if m := re.fullmatch(r"sed -i 's/(.*)/(.*)/' (\S+)", command):
            pattern, replacement, name = m.groups()
            edited = [re.sub(pattern, lambda _: replacement, line, count=1) for line in self.files[name].splitlines()]
            self.files[name] = "".join(f"{line}\n" for line in edited)
            return ""
        raise ValueError(f"no demonstration uses {command!r}")


def public_result(task: AnyTask, files: Mapping[str, str]) -> str:
    """What the task's public test.sh prints."""
    if isinstance(task, FixTask):
        operator = files[task.target].splitlines()[-1].split()[-2]
        result, expected = (calculate(o, *PUBLIC_CASE) for o in (operator, task.operator))
        return "PASS" if result == expected else f"FAIL: got {result}"
    if task.family == "look":
        right = files.get(task.output) == f"{task.value}\n"
    else:
        right = f"{task.setting} = {task.value}" in files[task.target].splitlines()
    return "PASS" if right else "FAIL"
