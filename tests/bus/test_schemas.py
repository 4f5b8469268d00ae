"""The published schemas are the code's, and a change that old journals can't survive is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from rl360.bus import events as ev
from rl360.bus.schemas import asyncapi, event_schemas, incompatibilities, write_schemas

KEPT = Path(__file__).parents[2] / "schemas"


def test_kept_schemas_are_those_of_the_code(tmp_path: Path) -> None:
    for path in write_schemas(tmp_path):
        assert path.read_text() == (KEPT / path.name).read_text(), f"run: rl360 schemas --out {KEPT.name}"


def test_an_event_validates_against_its_schema() -> None:
    event = ev.EngineJoined(run="r", generation="engine0-1", url="http://127.0.0.1:1")
    body = msgspec.to_builtins(event)
    jsonschema.Draft202012Validator(event_schemas()).validate(body)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(event_schemas()).validate({**body, "generation": 3})


def test_asyncapi_names_every_event_and_its_sender() -> None:
    document = asyncapi()
    assert set(document["channels"]) == set(ev.EVENT_TYPES)
    assert "trainer.StepTrained" in document["operations"]


def test_infra_failed_has_no_reward_field_s12() -> None:
    assert "reward" not in event_schemas()["$defs"]["InfraFailed"]["properties"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.pop("StepTrained"), "StepTrained is gone"),
        (lambda d: d["StepTrained"]["properties"].pop("loss"), "StepTrained.loss is gone"),
        (lambda d: d["StepTrained"]["properties"].update(loss={"type": "string"}), "StepTrained.loss changes"),
        (lambda d: d["StepTrained"]["required"].append("fresh"), "StepTrained.fresh is new"),
        (lambda d: d["Fate"]["enum"].remove("stale"), "Fate loses the value 'stale'"),
    ],
)
def test_incompatible_change_is_refused(change, why: str) -> None:
    old = event_schemas()
    new = copy.deepcopy(old)
    change(new["$defs"])
    assert any(x.startswith(why) for x in incompatibilities(old, new)), incompatibilities(old, new)


def test_new_field_with_default_is_compatible() -> None:
    old = json.loads(json.dumps(event_schemas()))
    new = copy.deepcopy(old)
    new["$defs"]["StepTrained"]["properties"]["fresh"] = {"type": "integer", "default": 0}
    assert incompatibilities(old, new) == []
