"""Two ranks in two processes, laid out in every way: the gradient of one, each reads its own samples, none outlives the other."""

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
from rl360.sessions.routing import pack_rows
from rl360.trainer import checkpoints, commands
from rl360.trainer.batch import TrainSample, plan_batch, weigh
from rl360.trainer.commands import SampleRef, Train
from rl360.trainer.crew_thread import CrewThread, RankLost

from .conftest import random_samples

DEADLINE = 120.0
LENGTHS = [40, 11, 25, 33, 8, 19, 30]


def recipe(folder: Path, **trainer: object) -> Config:
    """With experts, they are replayed."""
    replay = "moe" in folder.name
    shared = {"microbatch_tokens": 64, "clip_grad": 1e9, "old_policy": "keep_old_actor", "routing_replay": replay}
    return parse(
        {
            "policy": {"path": str(folder)},
            "sampling": {"context": 64, "max_new_tokens": 8},
            "engine": {"routed_experts": replay},
            "trainer": {**shared, **trainer},
        }
    )


def with_experts(sample: TrainSample, seed: int) -> bytes:
    """A row a token but the last: 2 of 4 experts in one layer."""
    rng = np.random.default_rng(seed)
    rows = [[rng.permutation(4)[:2]] for _ in range(len(sample) - 1)]
    return wire.encode(pack_rows(np.array(rows, np.uint8)))


def command(config: Config, run: Path, version: int = 0, seed: int = 0) -> Train:
    """As the ledger makes it, every sample in the blob store."""
    samples, divisor = weigh(random_samples(LENGTHS, version=version, seed=seed), "token_mean")
    blobs = BlobStore(run / "blobs")

    def stored(data: bytes) -> Payload:
        return Payload(size=len(data), digest=blobs.put(data))

    def ref(i: int, s: TrainSample) -> SampleRef:
        about = {"attempt": s.attempt, "branch": s.branch, "tokens": len(s), "sampled": s.sampled}
        routing = stored(with_experts(s, 100 * seed + i)) if config.trainer.routing_replay else None
        return SampleRef(**about, advantage=s.advantage, weight=s.weight, sample=stored(wire.encode(s.sample)), routing=routing)

    plan = plan_batch([ref(i, s) for i, s in enumerate(samples)], dp=config.trainer.dp, microbatch_tokens=64)
    ranks = tuple(tuple(m.samples for m in rank) for rank in plan.ranks)
    return Train(version=version, ranks=ranks, divisor=divisor, versions=(version,))


async def one_step(config: Config, run: Path, read: list[str] | None = None) -> tuple[Train, object, object]:
    """Train one step and save it; the command, the answer and the exported weights."""
    train = command(config, run)
    async with asyncio.timeout(DEADLINE), CrewThread(config, run) as crew:
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
    return {name.partition(".exp_avg.")[2]: t / 0.1 for name, t in held.items() if ".exp_avg." in name}


LAYOUTS = [
    ("dense_folder", {"dp": 2}),
    ("dense_folder", {"dp": 2, "distributed_optimizer": True}),
    ("dense_folder", {"tp": 2}),
    ("dense_folder", {"pp": 2}),
    ("dense_folder", {"cp": 2}),
    ("moe_folder", {"dp": 2}),
    ("moe_folder", {"dp": 2, "ep": 2}),
    ("moe_folder", {"tp": 2}),
    ("moe_folder", {"tp": 2, "ep": 2, "recompute": "full"}),
    ("moe_folder", {"pp": 2, "recompute": "full"}),
    ("moe_folder", {"cp": 2, "ep": 2}),
]


@pytest.fixture(scope="module")
def alone(dense_folder, moe_folder, tmp_path_factory):
    """One rank's answer, gradients and weights, by policy."""

    def run(folder: Path):
        where = tmp_path_factory.mktemp("alone")
        _, answer, exported = asyncio.run(one_step(recipe(folder), where))
        return answer, gradients(where), exported.weights

    return {"dense_folder": run(dense_folder), "moe_folder": run(moe_folder)}


@pytest.mark.parametrize(
    ("kind", "layout"),
    LAYOUTS,
    ids=lambda x: x.removesuffix("_folder") if isinstance(x, str) else "-".join(f"{k}{v}" for k, v in x.items()),
)
async def test_s20_two_ranks_make_the_gradient_of_one(kind, layout, alone, tmp_path, request):
    answer, one, weights = alone[kind]
    read: list[str] = []
    train, both, exported = await one_step(recipe(request.getfixturevalue(kind), **layout), tmp_path, read)
    assert max(float(g.abs().max()) for g in one.values()) > 1e-3
    if "distributed_optimizer" not in layout:  # which keeps its moments by memory, not by parameter
        two = gradients(tmp_path)
        assert one.keys() == two.keys()
        assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6
    assert both.grad_norm == pytest.approx(answer.grad_norm, rel=1e-5)
    assert both.loss == pytest.approx(answer.loss, abs=1e-6)
    assert both.metrics == pytest.approx(answer.metrics, rel=1e-4, abs=1e-6)
    assert {name: w.shape for name, w in exported.weights.items()} == {name: w.shape for name, w in weights.items()}
    moved = [float((exported.weights[name] - weights[name]).abs().max()) for name in weights]
    assert np.median(moved) < 1e-6, "all parts are gathered where they belong"
    own = {p.digest for m in train.ranks[0] for ref in m for p in (ref.sample, ref.routing) if p}
    assert set(read) == own, "CASES 26: a rank reads its own samples"


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dense_folder", {"dp": 2, "distributed_optimizer": True}),
        ("moe_folder", {"tp": 2, "ep": 2, "distributed_optimizer": True}),
        ("moe_folder", {"pp": 2}),
    ],
    ids=["dense-dp2-distributed", "moe-tp2-ep2-distributed", "moe-pp2"],
)
async def test_two_ranks_resume_exactly(kind, layout, tmp_path, request):
    """Two steps, against one step, a checkpoint, another life and the second step."""
    folder = request.getfixturevalue(kind)
    config = recipe(folder, **layout)
    first, second = command(config, tmp_path), command(config, tmp_path, version=1, seed=1)
    async with asyncio.timeout(DEADLINE), CrewThread(config, tmp_path) as crew:
        await crew.do(commands.Restore())
        await crew.do(first)
        await crew.do(commands.Save(0))
        answer = await crew.do(second)
        expected = (await crew.do(commands.Export(2))).weights
    saved = checkpoints.commit(tmp_path / "checkpoints", step=0, version=1, event=b"", hf_source=folder)
    async with asyncio.timeout(DEADLINE), CrewThread(config, tmp_path) as crew:
        await crew.do(commands.Restore(str(saved.path)))
        again = await crew.do(second)
        weights = (await crew.do(commands.Export(2))).weights
    assert again.grad_norm == answer.grad_norm
    assert again.loss == answer.loss
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


async def test_a_rank_that_dies_ends_the_trainer(dense_folder, tmp_path):
    async with asyncio.timeout(DEADLINE), CrewThread(recipe(dense_folder, dp=2), tmp_path) as crew:
        await crew.do(commands.Restore())
        (child,) = crew._children
        os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait(10)
        with pytest.raises(RankLost, match="rank 1"):
            await crew.do(commands.Restore())


PARENT = """
import sys, tempfile
from pathlib import Path
from rl360.config import Config, Trainer
from rl360.trainer.distributed import start_children
(child,) = start_children(Config(trainer=Trainer(dp=2)), Path("."), Path(tempfile.mkdtemp()))
print(child.process.pid, flush=True)
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
