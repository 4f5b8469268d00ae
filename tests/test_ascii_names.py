"""A name has ASCII digits: another script's would be a second spelling of the same step, group or life."""

from __future__ import annotations

import pytest

from rl360.bus.events import life_of
from rl360.engines.sglang.layout import _EXPERT
from rl360.journal.lines import Filter
from rl360.journal.manifest import _NAME
from rl360.journal.source import JournalError
from rl360.trainer.hf import layer_of

THREE = "٣"


def test_the_attempt_that_is_asked_for() -> None:
    with pytest.raises(JournalError, match="no attempt is called"):
        Filter(attempt=f"t{THREE}-g004-a1").patterns("demo")


def test_the_life_in_a_session() -> None:
    assert (life_of("t3-g004-a1.3"), life_of(f"t3-g004-a1.{THREE}")) == (3, 0)


@pytest.mark.parametrize("name", ["journal/events/step-00000{}-0000.msgpack", "checkpoints/step-00000{}/a.bin", "policy/a{}.bin"])
def test_a_member_of_an_archive(name: str) -> None:
    assert _NAME.fullmatch(name.format("3"))
    assert not _NAME.fullmatch(name.format(THREE))


def test_a_tensor() -> None:
    assert (layer_of("decoder.layers.3.x"), layer_of(f"decoder.layers.{THREE}.x")) == (3, None)
    assert not _EXPERT.fullmatch(f"model.layers.0.mlp.experts.{THREE}.up_proj.weight")
