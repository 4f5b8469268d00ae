"""The step 70 of the fixture, and worlds played in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl360.launch.journal_files import records
from rl360.replay.facts import StepFacts, facts_of

STEP70 = Path(__file__).parent.parent / "fixtures" / "step70"


@pytest.fixture(scope="session")
def step70() -> StepFacts:
    return facts_of(asyncio.run(records(STEP70, [70])), 70)
