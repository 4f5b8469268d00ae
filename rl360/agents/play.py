"""An agent in one place, against an OpenAI-compatible URL, outside of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl360.agents.harness.base import Assignment, Harness
from rl360.agents.outcomes import InfraError
from rl360.agents.playground import Place
from rl360.bus.events import AgentEnd, Boundary, Cause
from rl360.config import Agent

HarnessOf = Callable[[Assignment], Harness]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An OpenAI-compatible URL: up to and with /v1. `request` goes into every call, such as {"model": …, "temperature": …}."""

    url: str
    key: str
    request: dict[str, Any]


def run_agent(
    place: Place,
    name: str,
    endpoint: Endpoint,
    agent: Agent,
    harness_of: HarnessOf,
    scratch: Path,
    began: Callable[[Harness], None] = lambda _: None,
) -> AgentEnd:
    """Run the agent to its end, or to the end of its clock: then the verifier judges what is there (S14). Raises InfraError.

    `began` is told the harness before it runs, so that others can cancel it.
    """
    harness = harness_of(
        Assignment(
            task=place.task,
            staged=place.staged,
            sandbox=place.sandbox,
            config=agent,
            session=f"{name}-{place.task.step}",
            base_url=endpoint.url,
            key=endpoint.key,
            deadline=time.time() + place.seconds,
            traceparent="",
            scratch=scratch,
            request=endpoint.request,
        )
    )

    def end() -> None:
        harness.cancel()
        place.sandbox.kill_all()

    clock = threading.Timer(place.seconds, end)
    clock.daemon = True
    clock.start()
    place.ends.add(harness.cancel)
    began(harness)
    try:
        return harness.run()
    except InfraError as e:
        if (e.boundary, e.cause) == (Boundary.SANDBOX, Cause.OUT_OF_MEMORY):
            return AgentEnd.ERROR  # its own commands used up its memory (S14)
        raise
    finally:
        clock.cancel()
        place.ends.discard(harness.cancel)
