"""The hostile agents of the bwrap suite in containers: the same table, the same promises."""

from __future__ import annotations

import pytest

from rl360.agents.harness import base
from tests.agents.hostile import ATTACKS, play
from tests.agents.test_runner import Stage, quick, session, stage, task  # noqa: F401  (fixtures)
from tests.docker.daemon import Daemon

pytestmark = pytest.mark.docker


@pytest.mark.slow
async def test_hostile_agents_get_what_they_earned_and_hurt_nobody(
    daemon: Daemon,
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "PROBE_SECONDS", 1.5)
    assert await play(stage, list(ATTACKS), kind="docker", seconds=170.0, command_timeout=15.0) == {}
    for kind in (("ps", "-aq"), ("volume", "ls", "-q")):
        assert daemon.call(*kind, "--filter", f"label=rl360.run={stage.bus.run}").stdout == ""
    assert stage.nothing_left()
