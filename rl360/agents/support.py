"""What a task asks for and a sandbox here can't carry out: each with its key, the reason and the remedy. Pure.

A refusal is never a silent default: a task whose words have no effect would be another task under the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from rl360.agents.network import normalised, private
from rl360.agents.task_file import AgentSection, ArtifactSection, EnvironmentSection, TaskFile, VerifierSection

ANY: Final = "any"
"""Sandbox kind of what no sandbox can carry out."""
_DEFAULT_WORKDIR: Final = EnvironmentSection().workdir
_STEP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_ .-]*[A-Za-z0-9_-]|[A-Za-z0-9]", re.ASCII)
_TEMPLATE: Final = re.compile(r"\$\{([^}:]+)(:-(.*))?\}", re.DOTALL)
_NOT_DOCKER: Final = frozenset({"bwrap", "subprocess"})
_ALL: Final = _NOT_DOCKER | {"docker"}


@dataclass(frozen=True)
class Refusal:
    """`kinds` are the sandbox kinds that can't carry it out."""

    key: str
    why: str
    remedy: str
    kinds: frozenset[str] = _ALL

    def __str__(self) -> str:
        return f"key {self.key!r}: {self.why}; {self.remedy}"


def refusals(file: TaskFile, kind: str = ANY) -> tuple[Refusal, ...]:
    """What `kind` of sandbox can't carry out; `ANY`: what none can."""
    return tuple(r for r in _all(file) if (r.kinds == _ALL if kind == ANY else kind in r.kinds))


def resolved(env: dict[str, str]) -> dict[str, str]:
    """Values of an env table: `${NAME:-default}` is its default. Nothing of the host's environment reaches a task.

    >>> resolved({"A": "${HOME:-/root}", "B": "x"})
    {'A': '/root', 'B': 'x'}
    """
    return {key: m[3] if (m := _TEMPLATE.fullmatch(value)) and m[2] else value for key, value in env.items()}


def separate(task: VerifierSection, step: VerifierSection | None = None) -> bool:
    """Whether a verifier runs in a place without the agent's workdir. A step's word goes before the task's."""
    for section in (step, task):
        if section is not None and (section.environment_mode or section.environment):
            return section.environment_mode != "shared"
    return False


def artifact(entry: str | ArtifactSection) -> ArtifactSection:
    return ArtifactSection(source=entry) if isinstance(entry, str) else entry


def below(path: str, workdir: str) -> PurePosixPath | None:
    """The path inside the workdir of an artifact's source; None: it lies elsewhere."""
    pure = PurePosixPath(workdir) / path
    if ".." in pure.parts or not pure.is_relative_to(workdir):
        return None
    return pure.relative_to(workdir)


def _all(file: TaskFile) -> Iterator[Refusal]:
    yield from _environment(file.environment, "environment")
    yield from _agent(file.agent, "agent")
    yield from _verifier(file.verifier, "verifier", file.environment)
    yield from _env(file.solution.env, "solution.env")
    yield from _artifacts(file.artifacts, "artifacts", file.environment.workdir)
    yield from _steps(file)


def _environment(section: EnvironmentSection, key: str) -> Iterator[Refusal]:
    if section.gpus:
        yield Refusal(f"{key}.gpus", f"{section.gpus} GPUs asked for, and sandboxes have none", "take the key out or leave the task out")
    if section.tpu is not None:
        yield Refusal(f"{key}.tpu", "sandboxes have no TPU", "take the key out or leave the task out")
    if section.os.lower() != "linux":
        yield Refusal(f"{key}.os", f"{section.os!r}, and sandboxes run Linux only", "leave the task out")
    if section.mcp_servers:
        why = f"{len(section.mcp_servers)} MCP servers asked for, and no agent here speaks MCP"
        yield Refusal(f"{key}.mcp_servers", why, "give the tools as commands in the image, or leave the task out")
    if section.skills_dir:
        yield Refusal(f"{key}.skills_dir", "no agent here has skills", "say in instruction.md where the texts lie, and take the key out")
    yield from _network(section.network_mode, section.allowed_hosts, key)
    yield from _env(section.env, f"{key}.env")


def _agent(section: AgentSection, key: str) -> Iterator[Refusal]:
    yield from _user(section.user, key)
    yield from _network(section.network_mode, section.allowed_hosts, key)


def _verifier(section: VerifierSection, key: str, agents: EnvironmentSection) -> Iterator[Refusal]:
    yield from _user(section.user, key)
    yield from _network(section.network_mode, section.allowed_hosts, key)
    yield from _env(section.env, f"{key}.env")
    if section.collect:
        why = "commands of a task don't run between the agent's death and the verifier"
        yield Refusal(f"{key}.collect", why, "let tests/test.sh do it, or let the agent write the file")
    if section.environment is None:
        return
    if section.environment_mode == "shared":
        yield Refusal(f"{key}.environment_mode", "'shared', but the verifier has an environment of its own", "take one of the two out")
    yield from _environment(section.environment, f"{key}.environment")
    if section.environment.workdir not in (_DEFAULT_WORKDIR, agents.workdir):
        why = f"{section.environment.workdir!r} is not the agent's {agents.workdir!r}"
        yield Refusal(f"{key}.environment.workdir", why, "give both environments one workdir")
    if section.environment.docker_image:
        remedy = "put what it needs into tests/, and take the key out"
        yield Refusal(f"{key}.environment.docker_image", "a verifier's place is made of the task's own image", remedy)


def _user(user: str | int | None, key: str) -> Iterator[Refusal]:
    if user not in (None, "", "root", 0):
        why = f"{user!r}: a sandbox chooses the user, and shows the agent none of the verifier's files"
        yield Refusal(f"{key}.user", why, "take the key out")


def _network(mode: str | None, hosts: list[str] | None, key: str) -> Iterator[Refusal]:
    if mode == "allowlist":
        remedy = "use sandbox.kind = 'docker' or 'bwrap', or write 'no-network'"
        yield Refusal(f"{key}.network_mode", "'allowlist': this sandbox filters no hosts", remedy, frozenset({"subprocess"}))
        yield from _hosts(hosts or [], f"{key}.allowed_hosts")
    elif hosts:
        yield Refusal(
            f"{key}.allowed_hosts", "it goes with network_mode = 'allowlist' in the same table", "write both, or take the key out"
        )
    if mode == "public":
        remedy = "use sandbox.kind = 'docker', or write 'no-network'"
        yield Refusal(f"{key}.network_mode", "'public': this sandbox reaches its session only", remedy, _NOT_DOCKER)


def _hosts(hosts: list[str], key: str) -> Iterator[Refusal]:
    for host in hosts:
        try:
            entry = normalised(host)
        except ValueError as e:
            yield Refusal(key, f"{host!r}: {e}", "write it like 'pypi.org', '*.pypi.org', '192.0.2.1' or '192.0.2.0/24'")
        else:
            if private(entry):
                why = f"{host!r} is this machine or a private network, which no task reaches"
                yield Refusal(key, why, "put what it serves into the image, or take the entry out")


def _env(env: dict[str, str], key: str) -> Iterator[Refusal]:
    for name, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        if match and not match[2]:
            why = f"{value!r} asks for a variable of the host, which no task gets"
            yield Refusal(f"{key}.{name}", why, f"write the value itself, or a default: '${{{match[1]}:-value}}'")


def _artifacts(entries: list[str | ArtifactSection], key: str, workdir: str) -> Iterator[Refusal]:
    for entry in map(artifact, entries):
        if entry.service not in (None, "", "main"):
            yield Refusal(key, f"service {entry.service!r}: a sandbox is one place without services", "leave the task out")
        elif below(entry.source, workdir) is None:
            why = f"{entry.source!r} lies outside the workdir {workdir!r}, and ends with the agent"
            yield Refusal(key, why, "let the agent write it below the workdir")
        if entry.destination is not None and _leads_out(entry.destination):
            yield Refusal(key, f"destination {entry.destination!r} leads out of the artifacts' folder", "name a relative path")


def _leads_out(path: str) -> bool:
    pure = PurePosixPath(path)
    return pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in path or path == "manifest.json"


def _steps(file: TaskFile) -> Iterator[Refusal]:
    if file.steps:
        why = "a container's state outside the workdir doesn't go from step to step"
        yield Refusal("steps", why, "use sandbox.kind = 'bwrap', where steps share their workdir", frozenset({"docker"}))
    names = [step.name for step in file.steps]
    for number, step in enumerate(file.steps):
        key = f"steps.{step.name}"
        if not _STEP_NAME.fullmatch(step.name):
            yield Refusal("steps.name", f"{step.name!r} is no plain name of a folder", "use letters, digits, '_', '-' and '.'")
        if step.name.casefold() in (n.casefold() for n in names[:number]):
            yield Refusal("steps.name", f"{step.name!r} comes twice", "rename one of them")
        if isinstance(step.min_reward, dict) and set(step.min_reward) != {"reward"}:
            keys = ", ".join(step.min_reward)
            yield Refusal(f"{key}.min_reward", f"a verifier here gives one reward, and no {keys}", "give one number")
        yield from _agent(step.agent, f"{key}.agent")
        yield from _verifier(step.verifier, f"{key}.verifier", file.environment)
        yield from _artifacts(step.artifacts, f"{key}.artifacts", file.environment.workdir)
