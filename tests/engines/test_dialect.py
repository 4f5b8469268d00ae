"""How a server is driven follows from what it says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl360.engines.contract import ServerInfo
from rl360.engines.dialect import DialectError, dialect_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang"


def recorded(release: str, **changed: Any) -> ServerInfo:
    reply = json.loads((FIXTURES / f"{release}.json").read_text())["server_info"]["reply"]
    return msgspec.convert({**reply, **changed}, ServerInfo)


def test_the_two_measured_releases() -> None:
    old, new = dialect_of(recorded("0.5.17")), dialect_of(recorded("0.5.23"))
    assert (old.server, old.sums, old.backend, old.sessions, old.flush_pause, old.spans) == (
        "SGLang 0.5.17",
        "fused_cuda",
        "nccl",
        False,
        "abort",
        False,
    )
    assert (new.server, new.sums, new.backend, new.sessions, new.flush_pause, new.spans) == (
        "SGLang 0.5.23",
        "fused_cpu",
        "gloo",
        True,
        "retract",
        True,
    )
    assert (old.shared_memory, new.shared_memory) == (True, False)


@pytest.mark.parametrize(
    ("version", "sessions", "spans"), [("0.5.19", False, True), ("0.5.21.post1", True, True), ("0.6.0rc1", True, True)]
)
def test_releases_between_and_after(version: str, sessions: bool, spans: bool) -> None:
    dialect = dialect_of(recorded("0.5.17", version=version))
    assert (dialect.sessions, dialect.spans) == (sessions, spans)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": "0.5.16"}, "older than 0.5.17"),
        ({"version": "dev"}, "no version of SGLang"),
        ({"dp_size": 2}, "dp_size 2"),
        ({"pp_size": 2}, "start more engines"),
    ],
)
def test_what_cannot_be_driven_is_refused_with_the_reason(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(DialectError, match=why):
        dialect_of(recorded("0.5.17", **changed))
