"""The hostile agents of the bwrap suite in containers: the same table, the same promises."""

from __future__ import annotations

import pytest

from rl360.agents.harness import base
from tests.agents.hostile import ATTACKS, play
from tests.agents.test_runner import Stage, quick, session, stage, task  # noqa: F401  (fixtures)
from tests.docker.daemon import Daemon

pytestmark = pytest.mark.docker

HOLDS_THE_DAEMON = "stops all, again and again"
"""It stops the exec that the daemon is just starting; until that one ends, the daemon answers nothing about the container."""


@pytest.mark.slow
async def test_hostile_agents_get_what_they_earned_and_hurt_nobody(
    daemon: Daemon,
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "PROBE_SECONDS", 1.5)
    attacks = [name for name in ATTACKS if name != HOLDS_THE_DAEMON]
    assert await play(stage, attacks, kind="docker", seconds=170.0, command_timeout=15.0) == {}
    for kind in (("ps", "-aq"), ("volume", "ls", "-q")):
        assert daemon.call(*kind, "--filter", f"label=rl360.run={stage.bus.run}").stdout == ""
    assert stage.nothing_left()


@pytest.mark.slow
@pytest.mark.xfail(strict=True, raises=TimeoutError, reason="the runner asks the daemon before it kills, and waits for its answer")
async def test_s14_an_agent_that_stops_what_the_daemon_starts_is_judged(
    daemon: Daemon,
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "PROBE_SECONDS", 1.5)
    assert await play(stage, [HOLDS_THE_DAEMON], kind="docker", seconds=45.0) == {}
