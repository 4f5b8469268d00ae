"""task.toml of Harbor's task format (schema 1.4), typed, with its legacy spellings. Unknown keys are findings, not errors.

What the format allows and no sandbox here can carry out is refused in support.py.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast, get_args, get_type_hints

import msgspec
from msgspec import Meta

from rl360.errors import InputError

PositiveFloat = Annotated[float, Meta(gt=0)]
_RESERVED: Final = frozenset({"usr", "etc", "proc", "dev", "sys", "bin", "sbin", "lib", "lib64", "tests", "logs", "solution", "tmp"})

PositiveInt = Annotated[int, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
NetworkMode = Literal["no-network", "public", "allowlist"]


class TaskError(InputError):
    """A task that can't be used: the message names the file, the key and the remedy."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the sections of task.toml."""


class TaskSection(Section, frozen=True, kw_only=True):
    name: str = ""
    description: str = ""
    authors: list[Any] = []
    keywords: list[str] = []
    version: str = ""


class AgentSection(Section, frozen=True, kw_only=True):
    timeout_sec: PositiveFloat | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class HealthcheckSection(Section, frozen=True, kw_only=True):
    """A command that must end with 0 before the agent starts. Failures in the first `start_period_sec` count for nothing."""

    command: str
    interval_sec: NotNegative = 5.0
    timeout_sec: PositiveFloat = 30.0
    start_period_sec: NotNegative = 0.0
    start_interval_sec: NotNegative = 5.0
    retries: PositiveInt = 3


class ArtifactSection(Section, frozen=True, kw_only=True):
    """A file or folder to keep once the agent is dead. `exclude` holds shell patterns of names inside a folder."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class CollectSection(Section, frozen=True, kw_only=True):
    command: str
    service: str = "main"
    timeout_sec: PositiveFloat = 60.0
    user: str | int | None = None


class EnvironmentSection(Section, frozen=True, kw_only=True):
    """`memory` and `storage` are the legacy spellings of `memory_mb` and `storage_mb`, `allow_internet` of `network_mode`."""

    build_timeout_sec: PositiveFloat | None = None
    docker_image: str | None = None
    os: str = "linux"
    cpus: PositiveFloat | None = None
    memory_mb: PositiveInt | None = None
    storage_mb: PositiveInt | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: Annotated[int, Meta(ge=0)] = 0
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    allow_internet: bool | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    workdir: str = "/app"
    env: dict[str, str] = {}
    mcp_servers: list[Any] = []
    skills_dir: str | None = None
    healthcheck: HealthcheckSection | None = None


class VerifierSection(Section, frozen=True, kw_only=True):
    """`reward_min` and `reward_max` declare the range of rewards (S12)."""

    timeout_sec: PositiveFloat | None = None
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentSection | None = None
    collect: list[CollectSection] = []
    reward_min: float | None = None
    reward_max: float | None = None


class SolutionSection(Section, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class StepSection(Section, frozen=True, kw_only=True):
    """One step of several. Its files lie in steps/NAME; `min_reward` (a number: of "reward") ends the task below it."""

    name: str
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckSection | None = None
    artifacts: list[str | ArtifactSection] = []


class TaskFile(Section, frozen=True, kw_only=True):
    """The whole of task.toml. `version` is the legacy spelling of `schema_version`."""

    schema_version: str = "1.4"
    version: str | None = None
    source: str | None = None
    task: TaskSection = TaskSection()
    metadata: dict[str, Any] = {}
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()
    artifacts: list[str | ArtifactSection] = []
    steps: list[StepSection] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None

    @property
    def domain(self) -> str:
        """Kind of task, for per-domain means."""
        for key in ("domain", "category"):
            value = self.metadata.get(key)
            if isinstance(value, str) and value:
                return value
        return "default"

    @property
    def storage_mb(self) -> int | None:
        legacy = self.environment.storage
        return self.environment.storage_mb or (megabytes(legacy) if legacy else None)

    @property
    def memory_mb(self) -> int | None:
        legacy = self.environment.memory
        return self.environment.memory_mb or (megabytes(legacy) if legacy else None)


_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?\s*", re.IGNORECASE | re.ASCII)
_UNIT: Final = {"K": 1 / 1024, "": 1 / 1024**2, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def megabytes(text: str) -> int:
    """Legacy sizes: "2G", "512M", "1024Mi". Raises ValueError.

    >>> megabytes("2G"), megabytes("512 MiB")
    (2048, 512)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write it as '2G' or '512M'")
    return max(1, round(float(match[1]) * _UNIT[match[2].upper()]))


def read(path: Path) -> tuple[TaskFile, tuple[str, ...]]:
    """Parse task.toml; returns it with its unknown keys ("agent.timeot"). Raises TaskError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"{path}: missing; a task is a folder with task.toml, instruction.md and tests/test.sh") from None
    except (OSError, UnicodeDecodeError) as e:
        raise TaskError(f"{path}: can't be read as UTF-8 text ({e}); fix the file or leave the task out") from None
    except tomllib.TOMLDecodeError as e:
        raise TaskError(f"{path}: not valid TOML: {e}; mend that line") from None
    try:
        parsed = msgspec.convert(data, TaskFile, strict=True)
    except msgspec.ValidationError as e:
        raise TaskError(f"{path}: {_readable(str(e))}; correct the value or take the key out") from None
    _check(parsed, path)
    return parsed, tuple(_unknown(data, TaskFile))


def _readable(message: str) -> str:
    what, _, where = message.partition(" - at `$.")
    return f"key {where.rstrip('`')!r}: {what}" if where else what


@cache
def _hints(section: type[Section]) -> dict[str, Any]:
    return get_type_hints(section)


def _unknown(data: dict[str, Any], section: type[Section], prefix: str = "") -> list[str]:
    hints = _hints(section)
    found: list[str] = []
    for key, value in data.items():
        if key not in hints:
            found.append(prefix + key)
            continue
        below = [t for t in _types(hints[key]) if isinstance(t, type) and issubclass(t, Section)]
        parts = cast(list[Any], value if isinstance(value, list) else [value])
        for part in parts:
            if below and isinstance(part, dict):
                found += _unknown(cast(dict[str, Any], part), below[0], f"{prefix}{key}.")
    return found


def _types(hint: Any) -> list[Any]:
    """A hint and everything inside it: `list[str | X]` holds X."""
    return [hint, *(inner for arg in get_args(hint) for inner in _types(arg))]


def _check(file: TaskFile, path: Path) -> None:
    def refuse(key: str, why: str) -> None:
        raise TaskError(f"{path}: key {key!r}: {why}")

    if not file.environment.workdir.startswith("/") or file.environment.workdir.rstrip("/") == "" or ".." in file.environment.workdir:
        refuse("environment.workdir", f"{file.environment.workdir!r} must be an absolute path below /, such as /app")
    if file.environment.workdir.split("/")[1] in _RESERVED:
        refuse("environment.workdir", f"{file.environment.workdir!r} lies in a folder of the sandbox's own; use /app")
    for key, size in (("memory", file.environment.memory), ("storage", file.environment.storage)):
        try:
            if size is not None:
                megabytes(size)
        except ValueError as e:
            refuse(f"environment.{key}", f"{e}")
    for key, new in (("memory", file.environment.memory_mb), ("storage", file.environment.storage_mb)):
        old = getattr(file.environment, key)
        if old is not None and new is not None and megabytes(old) != new:
            refuse(f"environment.{key}", f"{old!r} is not environment.{key}_mb = {new}; take one of the two out")
