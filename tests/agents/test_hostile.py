"""Hostile agents in one runner, beside well-behaved ones: no reward that wasn't earned, no neighbour hurt, nothing left (S12-S17)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.agents.harness import base
from rl360.agents.sandbox.host import detect
from tests.agents.hostile import ATTACKS, play
from tests.agents.test_runner import Stage, quick, session, stage, task  # noqa: F401  (fixtures)

pytestmark = pytest.mark.skipif(detect().hierarchy is None, reason="cgroups are not writable here: an agent could hurt its neighbours")


async def test_hostile_agents_get_what_they_earned_and_hurt_nobody(
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "PROBE_SECONDS", 1.5)
    assert await play(stage, tuple(ATTACKS)) == {}
    assert stage.nothing_left()
    assert str(stage.dir) not in Path("/proc/self/mounts").read_text()
    assert [h for parent in detect().hierarchy.parents for h in parent.glob(stage.bus.run)] == []  # type: ignore[union-attr]
    assert {p.name for p in stage.dir.iterdir()} <= {"tasks", "sandboxes", "artifacts", "blobs", "store"}
