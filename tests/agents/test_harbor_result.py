"""What Harbor's result says, and what of it counts. The files were written by harbor 0.26.0's own trials."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rl360.agents.harness import harbor_nursery
from rl360.agents.harness.harbor_result import agent_end
from rl360.agents.outcomes import InfraError
from rl360.bus.events import AgentEnd, Boundary, Cause
from rl360.config import ConfigError, HarborAgent, load

RESULTS = Path(__file__).parent.parent / "fixtures" / "harbor"


def result(name: str) -> bytes:
    return (RESULTS / f"{name}.json").read_bytes()


def raised(name: str, said: str) -> bytes:
    """A recorded result in which another exception was raised."""
    data = json.loads(result("unknown"))
    data["exception_info"] |= {"exception_type": name, "exception_message": said}
    return json.dumps(data).encode()


def test_an_agent_that_ended_by_itself_submitted() -> None:
    assert agent_end(result("done")) is AgentEnd.SUBMITTED


def test_s14_what_the_policys_words_caused_is_for_the_verifier() -> None:
    assert agent_end(result("context")) is AgentEnd.CONTEXT
    assert agent_end(raised("RuntimeError", "trial__env: failed to send non-blocking keys: no server running")) is AgentEnd.ERROR


@pytest.mark.parametrize(
    ("name", "boundary", "cause", "exception"),
    [
        ("socket_timeout", Boundary.AGENT, Cause.LOST, "AgentTimeoutError"),
        ("before_agent", Boundary.AGENT, Cause.START_FAILED, "RuntimeError"),
        ("refused", Boundary.SESSION, Cause.REFUSED, "BadRequestError"),
        ("unknown", Boundary.AGENT, Cause.UNKNOWN, "KeyError"),
    ],
)
def test_s13_harbors_exceptions_are_typed_here(name: str, boundary: Boundary, cause: Cause, exception: str) -> None:
    with pytest.raises(InfraError) as caught:
        agent_end(result(name))
    assert (caught.value.boundary, caught.value.cause, caught.value.exception) == (boundary, cause, exception)


@pytest.mark.parametrize("reward", [0, 1, None])
def test_s12_a_reward_of_harbors_changes_nothing(reward: int | None) -> None:
    """Harbor calls a socket's TimeoutError an AgentTimeoutError and gives it a valid 0."""
    for name in ("done", "socket_timeout"):
        data = json.loads(result(name)) | {"verifier_result": {"rewards": {"reward": reward}}}
        if name == "done":
            assert agent_end(json.dumps(data).encode()) is AgentEnd.SUBMITTED
        else:
            with pytest.raises(InfraError):
                agent_end(json.dumps(data).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"exception_info": 3}', b"\xff"])
def test_s13_a_file_that_is_no_result_is_no_end_of_the_agents(data: bytes) -> None:
    with pytest.raises(InfraError) as caught:
        agent_end(data)
    assert caught.value.cause is Cause.UNKNOWN


def fake_python(folder: Path, found: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{found}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ('{"python": [3, 11, 7], "harbor": "", "problem": ""}', "is Python 3.11.7, and harbor needs 3.12"),
        ('{"python": [3, 12, 1], "harbor": "", "problem": ""}', "has no harbor: make a Python >= 3.12 environment"),
        (
            '{"python": [3, 12, 1], "harbor": "0.26.0", "problem": "installs itself into the sandbox, which has no network"}',
            '"terminus-2" of',
        ),
        ("no JSON", "is no Python >= 3.12 with harbor"),
    ],
)
def test_a_python_that_wont_do_is_named_before_anything_starts(tmp_path: Path, found: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^agent\.harbor\.") as caught:
        harbor_nursery.check(HarborAgent(python=fake_python(tmp_path, found)))
    assert words in str(caught.value)


def test_the_runners_own_python_is_asked_where_none_is_named() -> None:
    if sys.version_info >= (3, 12):
        pytest.skip("this Python may have harbor")
    with pytest.raises(ConfigError, match=r"harbor needs 3\.12"):
        harbor_nursery.check(HarborAgent())


def test_a_section_without_effect_is_refused(tmp_path: Path) -> None:
    recipe = Path(__file__).parent.parent.parent / "recipes" / "tiny.toml"
    with pytest.raises(ConfigError, match=r'agent\.harbor: has no effect unless agent\.harness = "harbor"'):
        load(recipe, ("agent.harbor.agent=oracle",))
