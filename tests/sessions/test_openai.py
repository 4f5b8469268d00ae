"""The real `openai` client against the session server (CASES 22)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from rl360.config import Sampling
from rl360.sessions.names import session_key
from tests.sessions.conftest import ADMIN, BASH, SESSION, Rig
from tests.sessions.fake_engine import call

USER: Any = {"role": "user", "content": "list files"}


def connect(rig: Rig, key: str = "") -> openai.AsyncOpenAI:
    url = f"{rig.url}/sessions/{SESSION}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key or session_key(ADMIN, SESSION), max_retries=0, timeout=10)


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with connect(rig) as c:
        yield c


async def test_plain_reply_and_models(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    reply = await client.chat.completions.create(model=models.data[0].id, messages=[USER])
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == ("ok", "stop", None)
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_tools_round_trip(client: openai.AsyncOpenAI, rig: Rig) -> None:
    rig.engine.script = ["Looking." + call("ls -l"), "done"]
    first = await client.chat.completions.create(model="policy", messages=[USER], tools=[BASH])  # type: ignore[list-item]
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "Looking."
    assert message.tool_calls is not None
    (tool,) = message.tool_calls
    assert (tool.type, tool.function.name, tool.function.arguments) == ("function", "bash", '{"command": "ls -l"}')
    result: Any = {"role": "tool", "tool_call_id": tool.id, "content": "a.py"}
    second = await client.chat.completions.create(model="policy", messages=[USER, message, result], tools=[BASH])  # type: ignore[list-item]
    assert second.choices[0].message.content == "done"
    assert await rig.metric("branches") == 0


async def test_streaming_gives_the_same_reply(client: openai.AsyncOpenAI, rig: Rig) -> None:
    rig.engine.script = ["Looking." + call("ls") + "\n" + call("pwd")]
    stream = await client.chat.completions.create(
        model="policy", messages=[USER], tools=[BASH], stream=True, stream_options={"include_usage": True}  # type: ignore[list-item]
    )  # fmt: skip
    text, calls, finish, usage = "", {}, None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for c in choice.delta.tool_calls or []:
                calls[c.index] = c.function.arguments
            finish = choice.finish_reason or finish
    assert (text, calls, finish) == ("Looking.", {0: '{"command": "ls"}', 1: '{"command": "pwd"}'}, "tool_calls")
    plain = await client.chat.completions.create(model="policy", messages=[USER], tools=[BASH])  # type: ignore[list-item]
    assert len(plain.choices[0].message.tool_calls or []) == 2
    assert plain.usage == usage
    assert len(rig.engine.requests) == 1  # the recorded turn again


async def test_a_turn_may_be_streamed_and_the_next_one_not(client: openai.AsyncOpenAI, rig: Rig) -> None:
    stream = await client.chat.completions.create(model="policy", messages=[USER], stream=True)
    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    await client.chat.completions.create(model="policy", messages=[USER, {"role": "assistant", "content": text}, USER])
    assert await rig.metric("branches") == 0


@pytest.mark.parametrize(
    ("messages", "error", "why"),
    [
        ([], openai.BadRequestError, "empty"),
        ([{"role": "robot", "content": "x"}], openai.BadRequestError, "unknown role"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            openai.UnprocessableEntityError,
            "text only",
        ),
        ([{"role": "user", "content": "x" * 2**20}], openai.APIStatusError, "413"),
    ],
)
async def test_wrong_input_is_a_4xx_with_a_reason(client: openai.AsyncOpenAI, messages: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        await client.chat.completions.create(model="policy", messages=messages)


async def test_wrong_key_and_stream_errors_come_as_status(rig: Rig) -> None:
    async with connect(rig, key="wrong") as wrong:
        with pytest.raises(openai.PermissionDeniedError):
            await wrong.chat.completions.create(model="policy", messages=[USER], stream=True)


async def test_s7_the_client_sees_that_the_session_has_ended(make_rig: Any) -> None:
    rig = await make_rig(sampling=Sampling(max_new_tokens=2, context=512))
    await rig.open()
    rig.engine.script = ["too long a reply"]
    async with connect(rig) as client:
        first = await client.chat.completions.create(model="policy", messages=[USER])
        assert first.choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError, match="session_ended: length") as e:
            await client.chat.completions.create(model="policy", messages=[USER, first.choices[0].message, USER])  # type: ignore[list-item]
    assert e.value.code == "session_ended"
