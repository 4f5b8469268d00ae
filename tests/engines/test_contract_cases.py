"""One contract: the same cases on the tiny engine and on SGLang's recorded replies."""

from __future__ import annotations

import re

import pytest

from rl360.engines.client import EngineClient, EngineError
from rl360.engines.dialect import dialect_of
from tests.engines.contract_cases import CASES, RECORDED_PROMPT, WITH_ROWS, WITH_SESSIONS, WITHOUT_ROWS, Subject
from tests.engines.replay_server import replay_server
from tests.engines.tiny_models import VOCAB, Oracle, moe
from tests.engines.tiny_server import DEADLINE, tiny_server

ALL = {**CASES, **WITH_SESSIONS, **WITH_ROWS, **WITHOUT_ROWS}
NOT_RECORDED = {
    "case29_a_label_is_what_the_next_reply_bears": "a recording doesn't remember",
    "a_pause_for_a_push_lets_the_cache_be_flushed": "its flush is part of a longer recording",
    "an_unknown_group_is_refused": "it was recorded with the group, too",
}
"""Left to the tiny engine and to the live test."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return moe(tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("case", [case for case in ALL if case not in WITH_SESSIONS])
async def test_the_tiny_engine(oracle: Oracle, case: str) -> None:
    async with tiny_server(oracle, routed_experts=case not in WITHOUT_ROWS) as server:
        client = EngineClient(server.session, server.url, "engine0-test", timeout=DEADLINE)
        prompt = [3 + i % (VOCAB - 3) for i in RECORDED_PROMPT]
        await ALL[case](Subject(client, await client.dialect(), prompt, rows=2, long=200))


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
@pytest.mark.parametrize("case", [case for case in ALL if case not in NOT_RECORDED])
async def test_sglang_as_it_was_recorded(version: str, case: str) -> None:
    async with replay_server(version) as client:
        subject = Subject(client, dialect_of(await client.server_info()), RECORDED_PROMPT, rows=4 * 4)
        if case in WITH_SESSIONS and not subject.dialect.sessions:
            with pytest.raises(EngineError, match="501"):  # it was not there to be recorded
                await ALL[case](subject)
            return
        await ALL[case](subject)


async def test_what_was_not_recorded_is_not_answered() -> None:
    async with replay_server("0.5.17") as client:
        with pytest.raises(EngineError, match=re.escape("not recorded: POST /abort_request")):
            await client.abort("somebody-else")
