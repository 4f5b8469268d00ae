"""Small multi-turn shell tasks in Harbor's format, made from a seed.

Three families, which are the tasks' domains: `fix` repairs the one wrong line of a shell script, `look` finds a
value and writes it to a file, `set` changes one setting and leaves the rest as it is. Everything a task runs is
POSIX sh and a few core tools, so an attempt costs milliseconds.

A task's instruction decides its split, by digest: no held-out instruction is ever a training one, whatever the
seeds and counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path
from typing import Final, Literal

from rl360.config import Tasks

Split = Literal["train", "eval"]
Family = Literal["fix", "look", "set"]

SUBMIT: Final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
RUN_TEST: Final = "sh test.sh"
OPERATORS: Final = {"sum": "+", "difference": "-", "product": "*", "remainder": "%", "xor": "^"}
PUBLIC_CASE: Final = (6, 3)  # the five operators give five different results for it
HIDDEN_CASES: Final = ((9, 2), (11, 5))  # together they tell the operators apart, and from a constant
EVAL_SHARE: Final = 4  # one instruction in this many is held out

_SCRIPTS: Final = [
    "calc",
    "area",
    "cost",
    "total",
    "score",
    "rate",
    "mix",
    "merge",
    "join",
    "blend",
    "pack",
    "move",
    "step",
    "scale",
    "size",
    "cart",
    "bank",
    "grid",
    "shift",
    "clock",
    "stock",
    "split",
    "ratio",
    "quota",
    "bonus",
    "audit",
]
_VARIABLES: Final = (("a", "b"), ("x", "y"), ("p", "q"), ("m", "n"), ("u", "v"), ("i", "j"), ("s", "t"), ("h", "k"))
_SERVICES: Final = ["redis", "mysql", "kafka", "nginx", "auth", "cache", "mail", "search", "proxy", "queue"]
_KEYS: Final = ["port", "limit", "timeout", "retries", "workers", "size", "ttl", "depth"]
_SETTINGS: Final = ["app.ini", "prod.ini", "dev.ini", "site.conf", "main.conf", "run.cfg", "base.cfg"]
_OUTPUTS: Final = ["answer.txt", "out.txt", "result.txt", "value.txt"]
_LINES: Final = 4


@dataclass(frozen=True, kw_only=True)
class ShellTask:
    """A task before it is written down.

    `target` is the file that the task is about. `read` shows what must be known, `edit` solves the task.
    `test` is the public script /app/test.sh; `checks` are the verifier's shell conditions, joined by "and".
    """

    family: Family
    instruction: str
    files: Mapping[str, str]
    target: str
    read: str
    edit: str
    test: str
    checks: tuple[str, ...]

    @property
    def name(self) -> str:
        content = "\0".join((self.instruction, *(f"{k}\0{v}" for k, v in sorted(self.files.items()))))
        return f"{self.family}-{blake2s(content.encode()).hexdigest()[:8]}"

    @property
    def split(self) -> Split:
        return "eval" if blake2s(self.instruction.encode()).digest()[0] % EVAL_SHARE == 0 else "train"


# ------------------------------------------------------------------------------------------------ the families


@dataclass(frozen=True, kw_only=True)
class FixTask(ShellTask):
    """`operator` is the right one; `names` are the script's two variables."""

    operator: str
    names: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class SettingTask(ShellTask):
    """`setting` is "service.key"; `value` is what must be written out, or what the setting must become."""

    setting: str
    value: int
    values: Mapping[str, int]
    output: str = ""


def calculate(operator: str, a: int, b: int) -> int:
    """What the shell's $((a operator b)) gives for positive numbers."""
    match operator:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "%":
            return a % b
        case "^":
            return a ^ b
        case _:
            raise ValueError(f"not an operator of these tasks: {operator!r}")


def settings_text(values: Mapping[str, int]) -> str:
    return "".join(f"{setting} = {value}\n" for setting, value in values.items())


def fix_edit(target: str, names: tuple[str, str], operator: str) -> str:
    a, b = names
    return f"sed -i 's/echo .*/echo $(({a} {operator} {b}))/' {target}"


def set_edit(target: str, setting: str, value: int) -> str:
    return f"sed -i 's/{setting} = .*/{setting} = {value}/' {target}"


def _public(condition: str, otherwise: str = "FAIL") -> str:
    return f"if {condition}; then echo PASS; else echo {otherwise}; fi\n"


def _fix(rng: random.Random) -> FixTask:
    target = f"{rng.choice(_SCRIPTS)}.sh"
    a, b = names = rng.choice(_VARIABLES)
    word = rng.choice(list(OPERATORS))
    operator = OPERATORS[word]
    wrong = rng.choice([o for o in OPERATORS.values() if o != operator])
    x, y = PUBLIC_CASE
    return FixTask(
        family="fix",
        instruction=f"Fix {target}: it must print the {word} of {a} and {b}. Test: {RUN_TEST}",
        files={target: f"{a}=$1 {b}=$2\necho $(({a} {wrong} {b}))\n"},
        target=target,
        read=f"cat {target}",
        edit=fix_edit(target, names, operator),
        test=f"r=$(sh {target} {x} {y} 2>&1)\n" + _public(f'[ "$r" = {calculate(operator, x, y)} ]', '"FAIL: got $r"'),
        checks=tuple(f'[ "$(timeout 2 sh {target} {x} {y})" = {calculate(operator, x, y)} ]' for x, y in HIDDEN_CASES),
        operator=operator,
        names=names,
    )


def _settings(rng: random.Random) -> tuple[str, str, dict[str, int]]:
    """A settings file: its name, the setting in question, and its lines. Other lines often share service or key."""
    service, key = rng.choice(_SERVICES), rng.choice(_KEYS)
    values = {f"{service}.{key}": rng.randint(10, 99)}
    while len(values) < _LINES:
        other = f"{rng.choice([*_SERVICES, *[service] * 3])}.{rng.choice([*_KEYS, *[key] * 3])}"
        values.setdefault(other, rng.randint(10, 99))
    lines = list(values.items())
    rng.shuffle(lines)
    return rng.choice(_SETTINGS), f"{service}.{key}", dict(lines)


def _unchanged(target: str, text: str) -> str:
    return f"[ \"$(cat {target} 2>/dev/null)\" = '{text.rstrip()}' ]"


def _look(rng: random.Random) -> SettingTask:
    target, setting, values = _settings(rng)
    service, key = setting.split(".")
    output, value = rng.choice(_OUTPUTS), values[setting]
    written = f'[ "$(cat {output} 2>/dev/null)" = {value} ]'
    return SettingTask(
        family="look",
        instruction=f"Write the {key} of {service} in {target} to {output}. Test: {RUN_TEST}",
        files={target: settings_text(values)},
        target=target,
        read=f"grep {setting} {target}",
        edit=f"echo {value} > {output}",
        test=_public(written),
        checks=(written, _unchanged(target, settings_text(values))),
        setting=setting,
        value=value,
        values=values,
        output=output,
    )


def _set(rng: random.Random) -> SettingTask:
    target, setting, values = _settings(rng)
    service, key = setting.split(".")
    value = rng.choice([v for v in range(10, 100) if v != values[setting]])
    after = settings_text({**values, setting: value})
    return SettingTask(
        family="set",
        instruction=f"Set the {key} of {service} in {target} to {value}. Test: {RUN_TEST}",
        files={target: settings_text(values)},
        target=target,
        read=f"grep {setting} {target}",
        edit=set_edit(target, setting, value),
        test=_public(f'[ "$(grep {setting} {target})" = "{setting} = {value}" ]'),
        checks=(_unchanged(target, after),),
        setting=setting,
        value=value,
        values=values,
    )


_FAMILIES: Final[tuple[Callable[[random.Random], FixTask | SettingTask], ...]] = (_fix, _look, _set)

AnyTask = FixTask | SettingTask


def draw(rng: random.Random, split: Split) -> Iterator[AnyTask]:
    """An endless stream of tasks of one split, the families in turn."""
    while True:
        for family in _FAMILIES:
            task = family(rng)
            while task.split != split:
                task = family(rng)
            yield task


# ------------------------------------------------------------------------------------------------ Harbor's format


def make_tasks(out: Path, *, seed: int, count: int, split: Split) -> list[Path]:
    """Write `count` tasks with different instructions under `out`; the same arguments give the same files.

    A task that is there already stays as it is.
    """
    return [write_task(out / task.name, task) for task in sample_tasks(seed=seed, count=count, split=split)]


def sample_tasks(*, seed: int, count: int, split: Split) -> list[AnyTask]:
    """The tasks that `make_tasks` writes. Their instructions are all different."""
    chosen: dict[str, AnyTask] = {}
    for task in draw(random.Random(f"{split} {seed}"), split):
        if len(chosen) == count:
            break
        chosen.setdefault(task.instruction, task)
    return list(chosen.values())


def generate_pool(config: Tasks, out: Path) -> tuple[list[Path], list[Path]]:
    """The training and the held-out tasks of a run with `tasks.source = "tiny_shell"`, under `out`/{train,eval}."""
    train = make_tasks(out / "train", seed=config.seed, count=config.pool, split="train")
    held_out = make_tasks(out / "eval", seed=config.seed, count=config.eval_pool, split="eval")
    return train, held_out


def write_task(folder: Path, task: AnyTask) -> Path:
    """Write one task; task.toml comes last, so a folder that has it is complete."""
    if not (folder / "task.toml").exists():
        for name, text in task_files(task).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if text.startswith("#!") else 0o644)
    return folder


def task_files(task: AnyTask) -> dict[str, str]:
    """Every file of a task's folder."""
    environment = {**task.files, "test.sh": task.test}
    return {
        "instruction.md": task.instruction,
        "environment/Dockerfile": f"FROM debian:12-slim\nCOPY {' '.join(environment)} /app/\n",
        **{f"environment/{name}": text for name, text in environment.items()},
        "tests/test.sh": _verifier(task),
        "solution/solve.sh": f"#!/bin/sh\ncd /app || exit 1\n{task.edit}\n",
        "task.toml": _TASK_TOML.format(family=task.family),
    }


def _verifier(task: AnyTask) -> str:
    """The verifier's own checks; it runs nothing of the public test.sh, and a failed check still writes a reward."""
    return f"""#!/bin/sh
cd /app || exit 1
reward=0
if {" && ".join(task.checks)}; then reward=1; fi
echo $reward > /logs/verifier/reward.txt
"""


_TASK_TOML: Final = """\
schema_version = "1.4"

[metadata]
domain = "{family}"
reward_range = [0.0, 1.0]

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 60.0

[environment]
workdir = "/app"
cpus = 1
memory_mb = 256
network_mode = "no-network"
"""
