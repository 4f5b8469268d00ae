"""Replies of weights that an update was changing are refused, and asked for again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rl360.engines.contract import TORN
from rl360.sessions.sampled import EngineReply, Refused, check


def reply(**meta: Any) -> EngineReply:
    known = {"id": "r.", "finish_reason": {"type": "stop"}, "prompt_tokens": 2, "completion_tokens": 2, "cached_tokens": 0}
    rows = {"weight_version": "3", "output_token_logprobs": [[-0.5, 7, None], [-0.1, 2, None]]}
    body = {"output_ids": [7, 2], "prompt_token_ids": [5, 6], "meta_info": {**known, **rows, **meta}}
    return msgspec.json.decode(msgspec.json.encode(body), type=EngineReply)


def accepted(it: EngineReply) -> list[int]:
    return check(it, prompt=b"5,6", prompt_tokens=2, min_version=0).ids


@pytest.mark.parametrize(
    "meta",
    [
        {"weight_version": TORN},
        {"weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": TORN, "start": 1, "end": 2}]},
        {"weight_version": TORN, "weight_versions": [{"version": "3", "start": 0, "end": 2}]},
    ],
)
def test_case31_no_turn_is_made_of_torn_weights(meta: dict[str, Any]) -> None:
    assert accepted(reply()) == [7, 2]
    with pytest.raises(Refused, match="an update was changing") as refused:
        accepted(reply(**meta))
    assert refused.value.again, "another engine, or this one after its next push, may answer"
