"""Worker kinds: which module runs each, which extra it needs, and which workers a recipe asks for."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Final, cast

import msgspec

from rl360.bus.worker import WorkerContext
from rl360.config import Config
from rl360.extras import MissingExtra

Main = Callable[[WorkerContext], Awaitable[None]]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A worker kind. `module` has `async def main(ctx)`; `extra` is the optional dependency it needs."""

    module: str
    does: str
    extra: str = ""


KINDS: Final[dict[str, Kind]] = {
    "scheduler": Kind(module="rl360.trainer.scheduler_worker", does="opens steps and admits attempts in waves"),
    "runner": Kind(module="rl360.agents.runner", does="runs agents in sandboxes and their verifiers", extra="agent"),
    "session": Kind(module="rl360.sessions.worker", does="serves the OpenAI API and owns the tokens"),
    "engine": Kind(module="rl360.engines.tiny.worker", does="samples tokens (tiny, or SGLang: engine.kind)", extra="tiny"),
    "membership": Kind(module="rl360.engines.membership_worker", does="watches engine leases, tells the gateway"),
    "merger": Kind(module="rl360.sessions.merge_worker", does="merges an attempt's turns into samples"),
    "filter": Kind(module="rl360.trainer.filter_worker", does="decides groups: baseline, advantages, fates"),
    "trainer": Kind(module="rl360.trainer.worker", does="makes the optimizer step and pushes the weights", extra="trainer"),
}


_SGLANG: Final = Kind(module="rl360.engines.sglang.worker", does="starts and drives one SGLang server", extra="gpu")


def load(kind: str, config: Config) -> Main:
    """The `main` of a worker kind. Raises MissingExtra naming the extra to install."""
    entry = _SGLANG if (kind, config.engine.kind) == ("engine", "sglang") else KINDS[kind]
    try:
        module = importlib.import_module(entry.module)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith("rl360"):
            raise
        raise MissingExtra(f"worker {kind!r}", e.name, entry.extra or "laptop") from None
    return cast(Main, module.main)


def workers_of(config: Config) -> list[tuple[str, int]]:
    """(kind, index) of every worker a recipe asks for, in the order in which they are started."""
    counts = {"engine": config.engine.count, "runner": config.runners.count, "session": config.sessions.count}
    order = ("trainer", "engine", "session", "membership", "merger", "filter", "runner", "scheduler")
    return [(kind, i) for kind in order for i in range(counts.get(kind, 1))]
