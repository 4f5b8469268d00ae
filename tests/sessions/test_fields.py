"""S3: every field of OpenAI's request is decided once: honoured, the run's own, harmless, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import completion_create_params as params

from rl360.sessions.fields import FIELDS, Settings
from rl360.sessions.requests import Body
from tests.sessions.conftest import BASH, Rig
from tests.sessions.fake_engine import call
from tests.sessions.test_openai import USER, connect

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


def of(kind: str) -> set[str]:
    return {name for name, field in FIELDS.items() if field.kind == kind}


def test_s3_every_field_of_the_openai_client_is_decided() -> None:
    known = params.CompletionCreateParamsBase.__annotations__.keys() | {"stream"}
    assert known == FIELDS.keys()
    assert set(Settings.__struct_fields__) == of("refused")
    assert set(Body.__struct_fields__) == of("refused") | of("honoured")


def test_s3_the_table_in_the_documentation_is_what_the_server_does() -> None:
    table = DOCS.read_text().partition("## What an agent may ask for")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    for kind in ("honoured", "run", "harmless", "refused"):
        said = {x.strip("` ") for line in rows if line.split("|")[2].strip() == kind for x in line.split("|")[1].split(",")}
        assert said == of(kind)


SENT: dict[str, Any] = {
    "n": 2,
    "stop": ["\n"],
    "logit_bias": {"5": 1},
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "logprobs": True,
    "top_logprobs": 3,
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "moderation": {"model": "m"},
}


@pytest.mark.parametrize(
    ("name", "value"), [*SENT.items(), ("n", 0), ("n", True), ("n", "1"), ("stop", "x"), ("tool_choice", {"type": "function"})]
)
async def test_s3_a_refused_field_is_a_400_with_the_reason(rig: Rig, name: str, value: Any) -> None:
    code, body = await rig.chat([USER], **{name: value})
    assert code == 400
    assert (body["error"]["code"], body["error"]["param"]) == ("unsupported_parameter", name)
    assert FIELDS[name].why in body["error"]["message"]
    assert rig.engine.requests == []


async def test_s3_every_refused_field_may_say_what_holds_anyway(rig: Rig) -> None:
    assert SENT.keys() == of("refused")
    code, body = await rig.chat([USER], **dict.fromkeys(SENT))
    assert code == 200, body
    for name in SENT:
        for value in FIELDS[name].allowed:
            code, body = await rig.chat([USER], **{name: value})
            assert code == 200, body
    code, body = await rig.chat([USER], n=1.0, frequency_penalty=0.0, presence_penalty=-0.0)
    assert code == 200, body


async def test_s3_the_runs_fields_change_nothing_that_is_sampled(rig: Rig) -> None:
    plain, _ = await rig.chat([USER]), await rig.chat([{"role": "user", "content": "another"}])
    values: dict[str, Any] = {"temperature": 0.0, "top_p": 0.1, "max_tokens": 1, "max_completion_tokens": 1, "seed": 7}
    assert values.keys() == of("run")
    assert await rig.chat([USER], **values) == plain
    await rig.chat([{"role": "user", "content": "third"}], **values)
    assert rig.engine.requests[1]["sampling_params"] == rig.engine.requests[2]["sampling_params"]


async def test_s3_harmless_fields_are_accepted_in_any_shape(rig: Rig) -> None:
    for value in ("x", {"a": "b"}, True, 5, None, []):
        code, body = await rig.chat([USER], **dict.fromkeys(of("harmless"), value))
        assert code == 200, body


async def test_s3_honoured_fields_do_what_openai_says(rig: Rig) -> None:
    rig.engine.script = [call("ls")]
    async with connect(rig) as client:
        stream: Any = await client.chat.completions.create(
            model="policy", messages=[USER], tools=[BASH], stream=True, stream_options={"include_usage": True}  # type: ignore[list-item]
        )  # fmt: skip
        chunks = [c async for c in stream]
    assert chunks[-1].usage.completion_tokens > 0
    assert [c.function.name for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or []] == ["bash"]


async def test_s3_the_openai_client_sees_why_n_is_refused(rig: Rig) -> None:
    async with connect(rig) as client:
        with pytest.raises(openai.BadRequestError, match="n = 2 can't be had: a turn has one reply") as e:
            await client.chat.completions.create(model="policy", messages=[USER], n=2)
    assert (e.value.code, e.value.param) == ("unsupported_parameter", "n")


async def test_unknown_fields_are_ignored(rig: Rig) -> None:
    code, _ = await rig.chat([USER], top_k=5, return_prompt_token_ids=False, extra={"a": [1]})
    assert code == 200
    assert rig.engine.requests[0]["return_prompt_token_ids"] is True
