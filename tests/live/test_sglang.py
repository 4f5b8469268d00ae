"""Opt-in: the contract on a real SGLang. RL360_SGLANG_URL names the server, RL360_SGLANG_MODEL the folder that it was started with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.live.sglang import drive

URL, MODEL = os.environ.get("RL360_SGLANG_URL", ""), os.environ.get("RL360_SGLANG_MODEL", "")


@pytest.mark.skipif(not (URL and MODEL), reason="RL360_SGLANG_URL and RL360_SGLANG_MODEL are not set")
@pytest.mark.timeout(600)
async def test_a_real_server_keeps_the_contract_and_takes_weights() -> None:
    report = await drive(URL, Path(MODEL), os.environ.get("RL360_SGLANG_DTYPE", "bfloat16"))
    assert report["failed"] == [], report
