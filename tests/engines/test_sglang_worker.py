"""The worker of `engine.kind = "sglang"`: one server, started exactly, proven before it joins, ended with its generation."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rl360.bus import events as ev
from rl360.bus.address import Addresses, Secrets
from rl360.bus.client import Bus
from rl360.bus.events import Cause
from rl360.bus.worker import WorkerContext
from rl360.config import parse
from rl360.engines.client import EngineError
from rl360.engines.generation import Fenced
from rl360.engines.probe import MissingCapability
from rl360.engines.sglang import worker
from rl360.engines.sglang.command import command
from tests.engines.tiny_models import Oracle, dense, moe

DEADLINE = 60.0


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return dense(tmp_path_factory.mktemp("dense"))


def context(bus: Bus, folder: Path, oracle: Oracle, fault: str = "", push_timeout: float = 10.0, **engine: Any) -> WorkerContext:
    """A recipe whose SGLang is the stand-in, with the fault that it is to have."""
    (folder / "logs").mkdir(exist_ok=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_sglang.py")} "$@"\n')
    python.chmod(0o755)
    root = str(Path(__file__).parents[2])
    server = {"python": str(python), "device": "cpu", "env": {"FAKE_SGLANG": fault, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}}
    data = {
        "run": {"name": bus.run},
        "policy": {"path": str(oracle.folder)},
        "sampling": {"context": 128, "max_new_tokens": 16},
        "engine": {"kind": "sglang", "lease_seconds": 1.0, "sglang": server, **engine},
        "push": {"timeout": push_timeout, "call_timeout": push_timeout / 2},
    }
    return WorkerContext(
        kind="engine",
        index=1,
        config=parse(data),
        dir=folder,
        bus=bus,
        addresses=Addresses(nats=""),
        secrets=Secrets(admin=""),
        stop=asyncio.Event(),
        log=logging.getLogger("rl360.engine1"),
    )


class Started:
    """A worker that has joined. `servers`: process ids of the servers that were started."""

    def __init__(self, task: asyncio.Task[None], joined: ev.EngineJoined, caplog: pytest.LogCaptureFixture) -> None:
        self.task, self.joined = task, joined
        self.server = next(r.args[1] for r in caplog.records if isinstance(r.args, tuple) and "process" in r.msg)

    @property
    def serving(self) -> bool:
        try:
            os.kill(self.server, 0)
        except ProcessLookupError:
            return False
        return True


@asynccontextmanager
async def started(ctx: WorkerContext, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Started]:
    caplog.set_level(logging.INFO, "rl360.engine1")
    task = asyncio.create_task(worker.main(ctx))
    reading = asyncio.create_task(_joined(ctx.bus))
    try:
        await asyncio.wait({task, reading}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE)
        if task.done():
            task.result()
        yield Started(task, reading.result(), caplog)
    finally:
        reading.cancel()
        ctx.stop.set()
        await asyncio.wait({task}, timeout=20)


async def _joined(bus: Bus) -> ev.EngineJoined:
    async with bus.reader(types=[ev.EngineJoined]) as reader:
        while True:
            record = await reader.next(timeout=1.0)
            if record is not None and isinstance(record.event, ev.EngineJoined):
                return record.event


async def test_a_server_joins_when_it_is_proven_and_ends_with_its_worker(
    bus: Bus, tmp_path: Path, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = context(bus, tmp_path, oracle)
    async with started(ctx, caplog) as it:
        assert it.joined.generation.startswith("engine1-") and it.joined.pid == os.getpid() and it.serving
        assert f"engine.{it.joined.generation}" in await bus.leases.keys()
        ctx.stop.set()
        await asyncio.wait_for(it.task, 20)
        assert not it.serving
        assert f"engine.{it.joined.generation}" not in await bus.leases.keys()
    assert "SGLang 0.5.23, proven" in caplog.text


async def test_a_server_that_ends_ends_its_worker_and_says_how(
    bus: Bus, tmp_path: Path, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(context(bus, tmp_path, oracle), caplog) as it:
        os.killpg(it.server, signal.SIGKILL)
        with pytest.raises(EngineError, match="ended with status -9") as error:
            await asyncio.wait_for(it.task, 20)
    assert error.value.cause is Cause.LOST and error.value.generation == it.joined.generation


async def test_case35_a_silent_server_is_ended(bus: Bus, tmp_path: Path, oracle: Oracle, caplog: pytest.LogCaptureFixture) -> None:
    async with started(context(bus, tmp_path, oracle, push_timeout=4.0), caplog) as it:
        os.killpg(it.server, signal.SIGSTOP)
        with pytest.raises(EngineError, match="silent for 4 s") as error:
            await asyncio.wait_for(it.task, 60)
        assert error.value.cause is Cause.TIMEOUT and not it.serving


async def test_a_fenced_generation_takes_its_server_with_it(
    bus: Bus, tmp_path: Path, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(context(bus, tmp_path, oracle), caplog) as it:
        await bus.publish(ev.EngineFenced(run=bus.run, generation=it.joined.generation, cause="missed the push of version 3"))
        with pytest.raises(Fenced, match="missed the push of version 3"):
            await asyncio.wait_for(it.task, 20)
        assert not it.serving


@pytest.mark.parametrize(("key", "value"), [("tie_word_embeddings", True), ("mlp_only_layers", [0])])
async def test_case23_a_policy_that_sglang_would_serve_from_unwritten_memory_is_refused(
    bus: Bus, tmp_path: Path, key: str, value: object
) -> None:
    policy = moe(tmp_path / "moe", dense=())
    path = policy.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(EngineError, match=f"config.json: {key} = ") as error:
        await asyncio.wait_for(worker.main(context(bus, tmp_path, policy)), DEADLINE)
    assert error.value.cause is Cause.REFUSED


@pytest.mark.parametrize(
    ("fault", "cause", "says"),
    [("dies", Cause.LOST, "CUDA out of memory"), ("never", Cause.START_FAILED, r"does not serve 2.7 s after its start")],
)
async def test_a_server_that_does_not_come_up_fails_the_start_with_the_end_of_its_log(
    bus: Bus, tmp_path: Path, oracle: Oracle, fault: str, cause: Cause, says: str
) -> None:
    with pytest.raises(EngineError, match=says) as error:
        await asyncio.wait_for(
            worker.main(context(bus, tmp_path, oracle, fault, start_seconds=3.0 if fault == "never" else 60.0)), DEADLINE
        )
    assert error.value.cause is cause and "engine1.sglang.log" in str(error.value)


@pytest.mark.parametrize(
    ("fault", "capability"),
    [("silent_echo", "tokens and log-probs"), ("no_rows", "routed experts"), ("other_layout", "weight checksums")],
)
async def test_case23_a_missing_capability_is_named_before_the_engine_joins(bus: Bus, tmp_path: Path, fault: str, capability: str) -> None:
    oracle = moe(tmp_path / "moe", dense=())
    with pytest.raises(MissingCapability, match=capability) as error:
        await asyncio.wait_for(worker.main(context(bus, tmp_path, oracle, fault, routed_experts=True)), DEADLINE)
    assert error.value.capability == capability
    assert [record async for record in bus.replay(types=[ev.EngineJoined])] == []


def test_the_command_line_is_what_the_recipe_says(tmp_path: Path) -> None:
    server = {"python": "/opt/sglang/bin/python", "tp": 4, "ep": 2, "first_gpu": 2, "mem_fraction": 0.7, "args": ["--page-size", "16"]}
    engine = {"kind": "sglang", "dtype": "bfloat16", "slots": 256, "routed_experts": True, "sglang": server}
    config = parse(
        {"policy": {"path": str(tmp_path)}, "engine": engine, "sampling": {"context": 32768}, "trainer": {"microbatch_tokens": 65536}}
    )
    line = " ".join(command(config, index=1, port=30000, seed=7, python="/usr/bin/python3"))
    assert line == (
        f"/opt/sglang/bin/python -m sglang.launch_server --model-path {tmp_path} --served-model-name policy --host 127.0.0.1 --port 30000 "
        "--device cuda --dtype bfloat16 --tp-size 4 --ep-size 2 --base-gpu-id 6 --mem-fraction-static 0.7 --context-length 32776 "
        "--max-running-requests 256 --random-seed 7 --weight-version 0 --skip-server-warmup --enable-return-routed-experts --page-size 16"
    )
