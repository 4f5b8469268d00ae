"""`rl360 tasks calibrate`: by a URL the tasks are played here; a recipe's own policy plays them in a run of one step.

That run is an ordinary one: engines, session servers and runners as in training, its first step's attempts are what counts,
and it ends with the one optimizer step that every run makes. It stays in the cache, so `rl360 explain` can be asked about it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import blake3
import msgspec

from rl360.agents.calibrate import Calibration, Kept, calibrate, counted, fingerprint
from rl360.agents.play import Endpoint
from rl360.agents.playground import playground
from rl360.agents.runner import harness_maker
from rl360.agents.tasks import Task, TaskError
from rl360.bus import events as ev
from rl360.config import Config, ConfigError
from rl360.launch import prepare
from rl360.launch.journal_files import open_source
from rl360.launch.task_commands import INTERRUPTED, chosen, recipe_of


@dataclass(frozen=True)
class Asked:
    """What the command line says, whoever the policy is."""

    dir: Path
    recipe: Path | None
    overrides: tuple[str, ...]
    cache: Path
    attempts: int
    seed: int


def by_url(asked: Asked, url: str, model: str, key_env: str, *, workers: int, as_json: bool) -> int:
    """Print the bands; 130 when it was interrupted."""
    config = recipe_of(asked.recipe, asked.overrides)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r}: an OpenAI-compatible URL starts with http:// or https:// and ends in /v1")
    tasks = chosen(asked.dir, config)
    request = {"model": model, "temperature": config.sampling.temperature, "max_tokens": config.sampling.max_new_tokens}
    endpoint = Endpoint(url=url.rstrip("/"), key=os.environ.get(key_env, ""), request=request)
    kept = Kept(asked.cache / "calibrated", f"{model} at {url} as {fingerprint(request, config.agent)}", asked.seed)
    results: dict[str, Calibration] = {}

    def each(result: Calibration) -> None:
        results[result.digest] = result
        done = sum(r.n + len(r.failures) for r in results.values())
        print(f"{done}/{len(tasks) * asked.attempts} {result.task}", file=sys.stderr)

    prepare.agent(config)
    interrupted = False
    try:
        with playground(asked.cache / "sandboxes", config, "calibrate") as ground:
            calibrate(tasks, asked.attempts, kept, ground, harness_maker(config.agent, ground.scratch), endpoint, each, workers)
    except KeyboardInterrupt:
        interrupted = True
    return tell([*results.values()], asked, interrupted=interrupted, as_json=as_json)


def by_recipe(asked: Asked, *, as_json: bool) -> int:
    """Print the bands; the run's own status when it didn't finish."""
    from rl360.launch.run import run

    config = recipe_of(asked.recipe, asked.overrides)
    tasks = chosen(asked.dir, config)
    if asked.attempts == 1:
        raise ConfigError("--attempts 1: a run's groups have two attempts or more; give --attempts 2")
    policy = f"{config.run.name} {_policy(config)}"
    kept = Kept(asked.cache / "calibrated", policy, asked.seed)
    status = 0
    if any(kept.get(task).n < asked.attempts for task in tasks):
        folder = asked.cache / "runs" / fingerprint(policy, asked.seed, asked.attempts, sorted(task.digest for task in tasks))
        pool = folder.with_name(f"{folder.name}-tasks")
        _copy(tasks, pool)
        values = {
            "tasks.source": pool.absolute(),
            "tasks.groups_per_step": len(tasks),
            "tasks.attempts_per_group": asked.attempts,
            "tasks.eval_every": 0,
            "tasks.qualify": "false",
            "run.steps": 1,
            "run.schedule": "sync",
            "run.seed": asked.seed,
        }
        overrides = (*asked.overrides, *(f"{key}={value}" for key, value in values.items()))
        with _stdout_to_stderr():
            if folder.exists():
                status = run(recipe=None, path=None, resume=folder, overrides=(), plain=True)
            else:
                status = run(recipe=asked.recipe, path=folder, resume=None, overrides=overrides, plain=True)
        _keep(asyncio.run(_outcomes(folder)), tasks, kept)
    return tell([kept.get(task) for task in tasks], asked, interrupted=status == INTERRUPTED, as_json=as_json) or status


def tell(results: Sequence[Calibration], asked: Asked, *, interrupted: bool, as_json: bool) -> int:
    if as_json:
        rows = [{**msgspec.to_builtins(r), "n": r.n, "passes": r.passes, "band": r.band} for r in results]
        bands = counted(results)
        print(json.dumps({"attempts": asked.attempts, "seed": asked.seed, "interrupted": interrupted, "bands": bands, "results": rows}))
        return INTERRUPTED if interrupted else 0
    print(f"{'band':>8} {'passed':>8} {'none':>5}  task")
    for r in sorted(results, key=lambda r: (r.n and r.passes / r.n, r.task)):
        why = f": {next(iter(r.failures.values()))}" if r.failures else ""
        print(f"{r.band:>8} {f'{r.passes}/{r.n}':>8} {len(r.failures):>5}  {r.task}{why}")
    print(f"bands of {len(results)} tasks, n = {asked.attempts}, seed {asked.seed}:", _bands(results))
    if interrupted:
        print(f"interrupted: finished attempts are kept in {asked.cache}, and the same command goes on from there")
    return INTERRUPTED if interrupted else 0


def _bands(results: Sequence[Calibration]) -> str:
    return "  ".join(f"{name}: {n}" for name, n in counted(results).items())


def _policy(config: Config) -> str:
    """What the policy is: its weights and all that has a say in what it samples and in how its agent works."""
    weights = config.policy.folder / "model.safetensors"
    try:
        digest = blake3.blake3(weights.read_bytes()).hexdigest()
    except OSError:
        raise ConfigError(
            f"policy.path: {weights} can't be read; a policy is a folder in Hugging Face layout (rl360 export makes one)"
        ) from None
    return fingerprint(digest, config.policy, config.agent, config.sampling, config.sessions.template, config.engine.dtype, config.budgets)


def _copy(tasks: Sequence[Task], pool: Path) -> None:
    """The chosen tasks and nothing else, whole or not at all."""
    if len({task.name for task in tasks}) < len(tasks):
        raise TaskError("two tasks have one name: a run tells tasks by name, so rename one of them (rl360 tasks lint names the folders)")
    if pool.exists():
        return
    aside = pool.with_name(f"{pool.name}.{os.getpid()}.tmp")
    for number, task in enumerate(tasks):
        shutil.copytree(task.dir, aside / f"{number:05}-{task.dir.name}", symlinks=True)
    aside.rename(pool)


class _stdout_to_stderr:
    """The run's own lines are progress; stdout holds the result alone."""

    def __enter__(self) -> None:
        self._stdout, sys.stdout = sys.stdout, sys.stderr

    def __exit__(self, *exc: object) -> None:
        sys.stdout = self._stdout


async def _outcomes(folder: Path) -> dict[tuple[str, int], float | str]:
    """What the first step's attempts came to, by task digest and attempt index."""
    asked: dict[str, tuple[str, int]] = {}
    found: dict[tuple[str, int], float | str] = {}
    async with open_source(folder) as source:
        for recorded in await source.records([0]):
            event = recorded.event
            if isinstance(event, ev.RolloutRequested) and event.purpose is ev.Purpose.TRAIN:
                asked[event.attempt] = (event.digest, event.index)
            elif isinstance(event, ev.VerifierResult) and event.attempt in asked:
                found.setdefault(asked[event.attempt], event.reward)
            elif isinstance(event, ev.InfraFailed) and event.attempt in asked:
                found.setdefault(asked[event.attempt], f"{event.boundary.value}/{event.cause.value}: {event.detail}")
    return found


def _keep(found: dict[tuple[str, int], float | str], tasks: Sequence[Task], kept: Kept) -> None:
    for task in tasks:
        result = kept.get(task)
        for (digest, index), outcome in found.items():
            if digest == task.digest:
                result = result.took(index, outcome)
        kept.put(task, result)
