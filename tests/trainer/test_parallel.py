"""Two data-parallel ranks in two processes: the gradient of one, each reads its own samples, none outlives the other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rl360.bus import sample as wire
from rl360.bus.blobs import BlobStore
from rl360.bus.payload import Payload
from rl360.config import Config, parse
from rl360.trainer import commands
from rl360.trainer.batch import TrainSample, plan_batch, weigh
from rl360.trainer.commands import SampleRef, Train
from rl360.trainer.crew_thread import CrewThread, RankLost

from .conftest import random_samples

DEADLINE = 120.0


def recipe(folder: Path, dp: int) -> Config:
    return parse(
        {
            "policy": {"path": str(folder)},
            "sampling": {"context": 64, "max_new_tokens": 8},
            "trainer": {"dp": dp, "microbatch_tokens": 64, "clip_grad": 1e9, "old_policy": "keep_old_actor"},
        }
    )


def command(samples: tuple[TrainSample, ...], divisor: float, blobs: BlobStore, dp: int) -> Train:
    """As the ledger makes it, every sample in the blob store."""

    def ref(s: TrainSample) -> SampleRef:
        data = wire.encode(s.sample)
        payload = Payload(size=len(data), digest=blobs.put(data))
        about = {"attempt": s.attempt, "branch": s.branch, "tokens": len(s), "sampled": s.sampled}
        return SampleRef(**about, advantage=s.advantage, weight=s.weight, sample=payload)

    plan = plan_batch([ref(s) for s in samples], dp=dp, microbatch_tokens=64)
    ranks = tuple(tuple(m.samples for m in rank) for rank in plan.ranks)
    return Train(version=0, ranks=ranks, divisor=divisor, versions=(0,))


async def one_step(folder: Path, run: Path, dp: int, read: list[str] | None = None) -> tuple[Train, object, object]:
    """Train one step on `dp` ranks and save it; the command, the answer and the exported weights."""
    samples, divisor = weigh(random_samples([40, 11, 25, 33, 8, 19, 30]), "token_mean")
    train = command(samples, divisor, BlobStore(run / "blobs"), dp)
    async with asyncio.timeout(DEADLINE), CrewThread(recipe(folder, dp), run) as crew:
        await crew.do(commands.Restore())
        if read is not None:
            blobs = crew._crew._rank._blobs
            original = blobs.get
            blobs.get = lambda digest: read.append(digest) or original(digest)  # type: ignore[method-assign]
        answer = await crew.do(train)
        await crew.do(commands.Save(0))
        exported = await crew.do(commands.Export(1))
    return train, answer, exported


def gradients(run: Path) -> dict[str, torch.Tensor]:
    """Adam's first moment after one step is the gradient times 0.1."""
    from megatron.core import dist_checkpointing

    from rl360.trainer.distributed import process_groups

    with process_groups():
        held = dist_checkpointing.load_plain_tensors(str(run / "checkpoints" / "step-000000.tmp" / "weights"))
    return {name: t / 0.1 for name, t in held.items() if ".exp_avg." in name}


@pytest.mark.parametrize("kind", ["dense_folder", "moe_folder"])
async def test_s20_two_ranks_make_the_gradient_of_one(kind, tmp_path, request):
    folder = request.getfixturevalue(kind)
    read: list[str] = []
    _, alone, _ = await one_step(folder, tmp_path / "one", 1)
    train, both, exported = await one_step(folder, tmp_path / "two", 2, read)
    one, two = gradients(tmp_path / "one"), gradients(tmp_path / "two")
    assert one.keys() == two.keys()
    assert max(float(g.abs().max()) for g in one.values()) > 1e-3
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6
    assert both.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
    assert both.loss == pytest.approx(alone.loss, abs=1e-6)
    assert both.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
    assert exported.weights.keys() >= {"model.norm.weight"}
    own = {ref.sample.digest for m in train.ranks[0] for ref in m}
    assert set(read) == own, "CASES 26: a rank reads its own samples"
    assert np.all([ref.sample.digest not in own for m in train.ranks[1] for ref in m])


async def test_a_rank_that_dies_ends_the_trainer(dense_folder, tmp_path):
    async with asyncio.timeout(DEADLINE), CrewThread(recipe(dense_folder, 2), tmp_path) as crew:
        await crew.do(commands.Restore())
        (child,) = crew._children
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)
        with pytest.raises(RankLost, match="rank 1"):
            await crew.do(commands.Restore())


PARENT = """
import sys, tempfile
from pathlib import Path
from rl360.config import Config, Trainer
from rl360.trainer.distributed import start_children
(child,) = start_children(Config(trainer=Trainer(dp=2)), Path("."), Path(tempfile.mkdtemp()))
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_rank_dies_with_rank_0(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    parent.kill()
    parent.wait(10)
    os.set_blocking(watch, False)
    import select

    assert select.select([watch], [], [], 30)[0], "the child outlived rank 0"
    os.close(watch)
