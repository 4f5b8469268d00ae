"""Tasks in Harbor's format: a folder with task.toml, instruction.md, environment/, tests/test.sh, solution/solve.sh.

A task of several steps has instruction.md, tests/, solution/ and workdir/ in steps/NAME, and is a task with `steps`, each
of which reads like a task of its own. A task is what its digest says: blake3 over every path, run bit and byte of the folder.
The Docker sandbox builds `environment/Dockerfile`; others copy the files of `environment/` (it and compose files aside) into the workdir.
"""

from __future__ import annotations

import math
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import blake3

from rl360.agents import support, task_file
from rl360.agents.network import Network
from rl360.agents.task_file import (
    AgentSection,
    ArtifactSection,
    EnvironmentSection,
    HealthcheckSection,
    StepSection,
    TaskError,
    TaskFile,
    VerifierSection,
)
from rl360.bus.events import Budgets
from rl360.config import BudgetSection

__all__ = ["Task", "TaskError", "TaskIndex", "digest_of_folder", "load_task", "load_tasks"]

MAX_BYTES: Final = 256 << 20
"""Of one task's folder: larger data belongs into an image."""

NOT_COPIED: Final = frozenset({"Dockerfile", "docker-compose.yaml", ".dockerignore"})
"""Files of environment/ that describe an image; everything else is copied into the workdir."""
_COMPOSE: Final = "docker-compose.yaml"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task, checked. Times are seconds; None: the recipe's budget alone decides."""

    name: str
    dir: Path
    digest: str
    verifier_digest: str
    instruction: str
    domain: str
    workdir: str
    files: tuple[str, ...]  # of environment/, relative, copied into the workdir
    env: dict[str, str]
    verifier_env: dict[str, str]
    solution_env: dict[str, str]
    agent_timeout: float | None
    verifier_timeout: float | None
    memory_mb: int | None
    storage_mb: int | None
    docker_image: str
    build_timeout: float | None
    network: Network  # the task's word for its agent's
    verifier_network: Network
    cpus: float | None
    low: float
    high: float
    oracle: bool  # solution/solve.sh is there
    unknown_keys: tuple[str, ...] = ()
    healthchecks: tuple[HealthcheckSection, ...] = ()
    artifacts: tuple[ArtifactSection, ...] = ()
    separate_verifier: bool = False  # it sees the artifacts, not the agent's workdir
    step: str = ""  # its name, of a step
    steps: tuple[Task, ...] = ()
    min_reward: float | None = None  # of a step: below it, the task ends
    final_reward: bool = False  # of several steps the last one's reward counts, not their mean

    def budgets(self, section: BudgetSection) -> Budgets:
        """The recipe's budgets, with the task's own shorter clocks for the agent and the verifier (S15)."""
        return Budgets(
            queue=section.queue,
            setup=section.setup,
            agent=min(section.agent, self.agent_timeout or math.inf),
            verify=min(section.verify, self.verifier_timeout or math.inf),
            collect=section.collect,
            margin=section.margin,
        )


def load_task(folder: Path) -> Task:
    """Read and check one task. Raises TaskError naming the file, the key and the remedy."""
    toml = folder / "task.toml"
    file, unknown = task_file.read(toml)
    if refused := support.refusals(file):
        raise TaskError(f"{toml}: {refused[0]}")
    return build(folder, file, unknown)


def build(folder: Path, file: TaskFile, unknown: tuple[str, ...] = ()) -> Task:
    """The task of a file that is read already. Raises TaskError for what its folder lacks."""
    if (compose := folder / "environment" / _COMPOSE).exists():
        raise TaskError(f"{compose}: a sandbox is one place without services; leave the task out, or make one image")
    if file.steps:
        return _of_steps(folder, file, unknown)
    return replace(_task(folder, file, unknown), instruction=_instruction(folder / "instruction.md"), **_tests(folder, folder))


def _task(folder: Path, file: TaskFile, unknown: tuple[str, ...]) -> Task:
    """What doesn't hang on a step."""
    low, high = _reward_range(file, folder / "task.toml")
    return Task(
        name=file.task.name or folder.name,
        dir=folder,
        digest=digest_of_folder(folder),
        verifier_digest="",
        instruction="",
        domain=file.domain,
        workdir=file.environment.workdir.rstrip("/"),
        files=tuple(_environment_files(folder / "environment")),
        env=support.resolved(file.environment.env),
        verifier_env=support.resolved(_verifier_env(file)),
        solution_env=support.resolved(file.solution.env),
        agent_timeout=file.agent.timeout_sec,
        verifier_timeout=file.verifier.timeout_sec,
        memory_mb=file.memory_mb,
        storage_mb=file.storage_mb,
        docker_image=file.environment.docker_image or "",
        build_timeout=file.environment.build_timeout_sec,
        network=_network(file.agent, file.environment),
        verifier_network=_network(file.verifier, file.verifier.environment or file.environment),
        cpus=file.environment.cpus,
        low=low,
        high=high,
        oracle=(folder / "solution" / "solve.sh").is_file(),
        unknown_keys=unknown,
        healthchecks=() if file.environment.healthcheck is None else (file.environment.healthcheck,),
        artifacts=tuple(support.artifact(entry) for entry in file.artifacts),
        separate_verifier=support.separate(file.verifier),
        final_reward=file.multi_step_reward_strategy == "final",
    )


def _of_steps(folder: Path, file: TaskFile, unknown: tuple[str, ...]) -> Task:
    whole = _task(folder, file, unknown)
    steps = tuple(_step(whole, file, step) for step in file.steps)
    digests = "".join(step.verifier_digest for step in steps).encode()
    return replace(
        whole,
        steps=steps,
        instruction=steps[0].instruction,
        verifier_digest=blake3.blake3(digests).hexdigest(),
        agent_timeout=_sum([step.agent_timeout for step in steps]),
        verifier_timeout=_sum([step.verifier_timeout for step in steps]),
        oracle=all(step.oracle for step in steps),
    )


def _step(whole: Task, file: TaskFile, step: StepSection) -> Task:
    folder = whole.dir / "steps" / step.name
    least = step.min_reward
    return replace(
        whole,
        step=step.name,
        instruction=_instruction(folder / "instruction.md"),
        **_tests(folder, whole.dir),
        verifier_env={**whole.verifier_env, **support.resolved(step.verifier.env)},
        agent_timeout=step.agent.timeout_sec or file.agent.timeout_sec,
        verifier_timeout=step.verifier.timeout_sec or file.verifier.timeout_sec,
        network=_network(step.agent) if step.agent.network_mode else whole.network,
        verifier_network=_network(step.verifier) if step.verifier.network_mode else whole.verifier_network,
        oracle=(folder / "solution" / "solve.sh").is_file(),
        healthchecks=whole.healthchecks if step.healthcheck is None else (*whole.healthchecks, step.healthcheck),
        artifacts=(*whole.artifacts, *(support.artifact(entry) for entry in step.artifacts)),
        separate_verifier=support.separate(file.verifier, step.verifier),
        min_reward=least["reward"] if isinstance(least, dict) else least,
    )


def _tests(folder: Path, whole: Path) -> dict[str, Any]:
    """The verifier's digest: of `folder`'s tests together with those that all steps share. Raises TaskError without test.sh."""
    found = [place for place in dict.fromkeys((whole / "tests", folder / "tests")) if place.is_dir()]
    if not any((place / "test.sh").is_file() for place in found):
        raise TaskError(f"{folder / 'tests' / 'test.sh'}: missing; it must write /logs/verifier/reward.txt or reward.json")
    digests = [digest_of_folder(place) for place in found]
    return {"verifier_digest": digests[0] if len(digests) == 1 else blake3.blake3("".join(digests).encode()).hexdigest()}


def _verifier_env(file: TaskFile) -> dict[str, str]:
    """What its place has, the agent's or its own, and over that what the verifier alone is given."""
    place = file.verifier.environment or file.environment
    return {**place.env, **file.verifier.env}


def _network(*sections: AgentSection | VerifierSection | EnvironmentSection) -> Network:
    """The first word of these; its hosts go with it."""
    for section in sections:
        if section.network_mode:
            return Network(section.network_mode, tuple(section.allowed_hosts or ()))
    return Network()


def _sum(seconds: Sequence[float | None]) -> float | None:
    """None, no bound of the task's own, where one of the steps has none."""
    known = [s for s in seconds if s is not None]
    return sum(known) if len(known) == len(seconds) else None


def load_tasks(root: Path) -> tuple[Task, ...]:
    """Every task below `root`, by name. Raises TaskError for a bad one, for two of one name, and for none at all."""
    found: dict[str, Task] = {}
    for toml in sorted(root.rglob("task.toml")):
        task = load_task(toml.parent)
        if task.name in found:
            raise TaskError(f"{toml}: key 'task.name': {task.name!r} is the name of {found[task.name].dir} too; rename one of them")
        found[task.name] = task
    if not found:
        raise TaskError(f"{root}: no task.toml below it; a folder of tasks has one folder a task, each with a task.toml")
    return tuple(found[name] for name in sorted(found))


class TaskIndex:
    """Tasks of a run by digest, read when they are first asked for. Safe for many threads."""

    def __init__(self, *roots: Path) -> None:
        self._roots = roots
        self._lock = threading.Lock()
        self._by_digest: dict[str, Task] = {}

    def find(self, name: str, digest: str) -> Task:
        """The task whose folder has this digest. Raises TaskError when none does (it was changed or is missing)."""
        with self._lock:
            if digest not in self._by_digest:
                self._by_digest |= {task.digest: task for root in self._roots if root.is_dir() for task in load_tasks(root)}
            if digest in self._by_digest:
                return self._by_digest[digest]
        places = ", ".join(map(str, self._roots))
        raise TaskError(f"task {name!r}: no folder with digest {digest[:12]} in {places}; restore the task as it was when the step opened")


def digest_of_folder(folder: Path) -> str:
    """blake3 over the relative path, the run bit and the bytes of every file, in path order (64 hex characters).

    Raises TaskError for anything that is neither a file, a folder nor a link, and above `MAX_BYTES`.
    """
    total = blake3.blake3()
    size = 0
    for path in _walk(folder):
        mode = path.lstat().st_mode
        name = path.relative_to(folder).as_posix().encode()
        if stat.S_ISLNK(mode):
            kind, content = b"l", os.readlink(path).encode()
        else:
            kind, content = b"x" if mode & 0o100 else b"-", path.read_bytes()
        size += len(content)
        if size > MAX_BYTES:
            raise TaskError(f"{folder}: more than {MAX_BYTES >> 20} MiB; put large data into an image")
        total.update(b"%d %s%s %d\0" % (len(name), name, kind, len(content)))
        total.update(content)
    return total.hexdigest()


def _walk(folder: Path) -> Iterator[Path]:
    """Files and links below a folder, sorted, links not followed."""
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path)
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield path
        else:
            raise TaskError(f"{path}: neither a file, a folder nor a link; remove it from the task")


def _environment_files(folder: Path) -> Iterator[str]:
    if folder.is_dir():
        names = (path.relative_to(folder).as_posix() for path in _walk(folder))
        yield from (name for name in names if name not in NOT_COPIED)


def _instruction(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path}: missing; it is the agent's first message") from None
    except (OSError, UnicodeDecodeError) as e:
        raise TaskError(f"{path}: can't be read as UTF-8 text ({e}); fix the file or leave the task out") from None
    if not text.strip():
        raise TaskError(f"{path}: empty; it is the agent's first message")
    return text


def _reward_range(file: TaskFile, toml: Path) -> tuple[float, float]:
    """`[verifier] reward_min/reward_max`, else `[metadata] reward_range = [low, high]`, else 0 to 1 (S12)."""
    low, high = 0.0, 1.0
    declared: object = file.metadata.get("reward_range")
    if declared is not None:
        low, high = _pair(declared, toml)
    low = low if file.verifier.reward_min is None else file.verifier.reward_min
    high = high if file.verifier.reward_max is None else file.verifier.reward_max
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise TaskError(f"{toml}: key 'verifier.reward_max': the range [{low:g}, {high:g}] must be finite and rise; correct it")
    return low, high


def _pair(declared: object, toml: Path) -> tuple[float, float]:
    values = cast(list[Any], declared) if isinstance(declared, list) else []
    if len(values) != 2 or not all(map(_is_number, values)):
        raise TaskError(f"{toml}: key 'metadata.reward_range': {declared!r} can't be the range; write two numbers, [low, high]")
    return float(values[0]), float(values[1])


def _is_number(value: object) -> bool:
    """One that a float holds: TOML has integers of any size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -sys.float_info.max <= value <= sys.float_info.max
