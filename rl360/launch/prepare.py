"""Before the workers start: the run's tasks, laid down in its folder, linted and qualified."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rl360.agents.lint import lint
from rl360.agents.qualify import qualify_all
from rl360.agents.tasks import Task, TaskError, load_tasks
from rl360.config import Config, ConfigError, Policy
from rl360.launch.rundir import RunDir

GENERATED: Final = "tiny_shell"
"""`tasks.source` of the starter tasks, which are generated from `tasks.seed`."""
_SHOWN: Final = 5
_METADATA: Final = "__metadata__"
_POLICY_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json")


def policy(config: Config) -> None:
    """Refuse a policy folder that lacks a part, before anything is started. Raises ConfigError."""
    folder = config.policy.folder
    missing = [name for name in _POLICY_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"policy.path: {folder} lacks {', '.join(missing)}; a policy is a folder in Hugging Face layout (rl360 export makes one)"
        )
    for path in folder.glob("*.safetensors"):
        _check_weights(path)


def sources(config: Config) -> None:
    """Refuse tasks that aren't there, before anything is laid out. Raises ConfigError."""
    for key, source in (("tasks.source", config.tasks.source), ("tasks.eval_source", config.tasks.eval_source)):
        if source and source != GENERATED and not Path(source).is_dir():
            raise ConfigError(f"{key}: {source} is not a folder; name a folder of Harbor-format tasks, or {GENERATED!r}")


def agent(config: Config) -> None:
    """Refuse a Python without harbor, before anything is laid out, where the recipe's agent needs it. Raises ConfigError."""
    if config.agent.harness == "harbor":
        from rl360.agents.harness import harbor_nursery  # only where Harbor is used

        harbor_nursery.check(config.agent.harbor)


def _check_weights(path: Path) -> None:
    """A file that was cut off is found by its own header: engines would find it, one after the other, and use their restarts up."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        head = file.read(size) if size < path.stat().st_size else b""
    try:
        ends = [
            int(entry["data_offsets"][1]) for name, entry in msgspec.json.decode(head, type=dict[str, Any]).items() if name != _METADATA
        ]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, IndexError):
        raise ConfigError(f"policy.path: {path} is no safetensors file, or its head is cut off: copy it again") from None
    if (wanted := 8 + size + max(ends, default=0)) != path.stat().st_size:
        raise ConfigError(f"policy.path: {path} has {path.stat().st_size} bytes where its head says {wanted}: copy it again")


def upcycle(config: Config, folder: Path) -> Config:
    """The recipe with its policy's experts made, in `folder`/policy; the recipe itself when it asks for none. Raises ConfigError."""
    asked = config.policy
    if not asked.experts:
        return config
    from rl360.tiny.upcycle import Recipe, UpcycleError, upcycle

    made = (folder / "policy").resolve()
    try:
        upcycle(asked.folder, made, Recipe(experts=asked.experts, topk=asked.experts_per_token), config.run.seed)
    except UpcycleError as e:
        raise ConfigError(f"policy.experts: {e}") from None
    return msgspec.structs.replace(config, policy=Policy(path=str(made)))


async def tasks(folder: RunDir, say: Callable[[str], None]) -> None:
    """Lay down `tasks/train` and `tasks/eval`. Raises TaskError naming the first task that can't be used, NoDaemon without Docker."""
    config, root = folder.config, folder.path / "tasks"
    if config.sandbox.kind == "docker":
        await asyncio.to_thread(_reach_docker)
    await asyncio.to_thread(_lay_down, config, root)
    train = load_tasks(root / "train")
    held_out = load_tasks(root / "eval") if (root / "eval").is_dir() else ()
    if len(train) < config.tasks.groups_per_step:
        raise ConfigError(f"tasks.groups_per_step is {config.tasks.groups_per_step}, but {root / 'train'} holds {len(train)} tasks")
    chosen = (*train, *held_out)
    _lint(chosen, config.sandbox.kind, say)
    if config.sessions.divergence == "reject" and (several := next((task.name for task in chosen if task.steps), "")):
        raise ConfigError(f'sessions.divergence = "reject": task {several!r} has steps, each a conversation of its own: write "branch"')
    if config.tasks.qualify:
        cache = folder.path / "tasks" / "qualified"
        sandboxes = folder.path / "sandboxes"
        await asyncio.to_thread(lambda: qualify_all(chosen, sandboxes=sandboxes, cache=cache, config=config))
    say(f"tasks: {len(train)} to train on, {len(held_out)} held out{', qualified' if config.tasks.qualify else ''}")


def _reach_docker() -> None:
    from rl360.agents.sandbox.docker.engine import Engine, address  # only where a Docker daemon is used

    Engine(address())


def _lay_down(config: Config, root: Path) -> None:
    if config.tasks.source == GENERATED:
        from rl360.tiny.shell_tasks import generate_pool

        generate_pool(config.tasks, root)
        return
    copy(Path(config.tasks.source), root / "train")
    if config.tasks.eval_source:
        copy(Path(config.tasks.eval_source), root / "eval")


def copy(source: Path, out: Path) -> None:
    """Whole or not at all: a copy that was cut off is made again, one that is there is what a resumed run goes on with."""
    if out.exists():
        return
    aside = out.with_name(f"{out.name}.tmp")
    if aside.exists():
        shutil.rmtree(aside)
    shutil.copytree(source, aside, symlinks=True)
    aside.rename(out)


def _lint(chosen: Sequence[Task], kind: str, say: Callable[[str], None]) -> None:
    """Say the warnings. Raises TaskError for what this kind of sandbox can't carry out."""
    found = [finding for task in chosen for finding in lint(task.dir, kind)]
    if errors := [finding.message for finding in found if finding.level == "error"]:
        raise TaskError(f"{errors[0]}" + (f" (and {len(errors) - 1} more: rl360 tasks lint)" if errors[1:] else ""))
    warnings = [finding.message for finding in found]
    for message in warnings[:_SHOWN]:
        say(f"warning: {message}")
    if len(warnings) > _SHOWN:
        say(f"… and {len(warnings) - _SHOWN} more warnings about tasks")
