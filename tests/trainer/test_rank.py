"""One rank carries out commands: what it restores, scores and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl360.bus import sample as wire
from rl360.bus.blobs import BlobStore
from rl360.config import Config, parse
from rl360.trainer import checkpoints
from rl360.trainer.batch import plan_batch, weigh
from rl360.trainer.commands import Export, Restore, SampleRef, Save, Train
from rl360.trainer.copies import CopyError
from rl360.trainer.rank import Rank

from .conftest import random_samples


def recipe(folder: Path, *, dtype: str = "float32", schedule: str = "sync", **trainer: object) -> Config:
    return parse(
        {
            "run": {"schedule": schedule},
            "policy": {"path": str(folder)},
            "sampling": {"context": 64, "max_new_tokens": 8},
            "engine": {"dtype": dtype},
            "trainer": {"lr": 1e-2, "microbatch_tokens": 64, **trainer},
        }
    )


def command(run: Path, version: int, sampled_by: int, seed: int = 0) -> Train:
    samples, divisor = weigh(random_samples([30, 20, 14], version=sampled_by, seed=seed), "token_mean")
    blobs = BlobStore(run / "blobs")
    refs = [
        SampleRef(
            attempt=s.attempt,
            branch=0,
            tokens=len(s),
            sampled=s.sampled,
            advantage=s.advantage,
            weight=s.weight,
            sample=blobs.pack(wire.encode(s.sample)),
        )
        for s in samples
    ]
    plan = plan_batch(refs, dp=1, microbatch_tokens=64)
    return Train(version=version, ranks=(tuple(m.samples for m in plan.ranks[0]),), divisor=divisor, versions=(sampled_by,))


def trained(rank: Rank, run: Path, folder: Path, steps: int) -> checkpoints.Checkpoint:
    """Steps 0, 1, … with a checkpoint each; the last one."""
    for step in range(steps):
        rank.perform(command(run, step, step, seed=step))
        rank.perform(Save(step))
        last = checkpoints.commit(run / "checkpoints", step=step, version=step + 1, event=b"", hf_source=folder)
    return last


def test_s22_a_kl_term_is_measured_against_the_starting_policy(dense_folder, tmp_path, groups):
    rank = Rank(recipe(dense_folder, kl_coef=0.1), tmp_path)
    rank.perform(Restore())
    first = rank.perform(command(tmp_path, 0, 0))
    second = rank.perform(command(tmp_path, 1, 1))
    assert first.metrics["train/kl"] == pytest.approx(0, abs=1e-9)
    assert second.metrics["train/kl"] > 1e-6


@pytest.mark.parametrize("copies", ["cpu", "gpu"])
def test_s22_after_a_restart_the_old_actors_come_from_their_checkpoints(copies, dense_folder, tmp_path, groups):
    config = recipe(dense_folder, old_policy="keep_old_actor", max_staleness=2, copies=copies)
    rank = Rank(config, tmp_path)
    rank.perform(Restore())
    last = trained(rank, tmp_path, dense_folder, 3)
    expected = rank.perform(command(tmp_path, 3, 1, seed=9)).metrics
    again = Rank(config, tmp_path)
    again.perform(Restore(str(last.path)))
    assert again.perform(command(tmp_path, 3, 1, seed=9)).metrics == expected
    assert expected["staleness/max"] == 2


def test_s22_a_version_that_is_gone_is_named(dense_folder, tmp_path, groups):
    rank = Rank(recipe(dense_folder, old_policy="keep_old_actor"), tmp_path)
    rank.perform(Restore())
    with pytest.raises(CopyError, match="version 7"):
        rank.perform(command(tmp_path, 8, 7))


def test_a_damaged_older_checkpoint_is_said_and_only_its_version_is_lost(dense_folder, tmp_path, groups, caplog):
    config = recipe(dense_folder, old_policy="keep_old_actor", max_staleness=2)
    rank = Rank(config, tmp_path)
    rank.perform(Restore())
    last = trained(rank, tmp_path, dense_folder, 3)
    (tmp_path / "checkpoints" / "step-000000" / "weights" / "metadata.json").write_bytes(b"")
    again = Rank(config, tmp_path)
    again.perform(Restore(str(last.path)))
    assert "version 1 are not held" in caplog.text
    assert again._copies.versions == [2, 3]


def test_weights_of_an_older_version_are_exported_from_where_they_lie(dense_folder, tmp_path, groups):
    rank = Rank(recipe(dense_folder), tmp_path)
    rank.perform(Restore())
    trained(rank, tmp_path, dense_folder, 2)
    start = load_file(dense_folder / "model.safetensors")
    zero, one, two = (rank.perform(Export(v)).weights for v in (0, 1, 2))
    assert all(torch.equal(zero[name], start[name]) for name in start)
    name = "model.norm.weight"
    assert not torch.equal(one[name], zero[name])
    assert not torch.equal(two[name], one[name])


def test_weights_are_exported_in_the_engines_dtype(moe_folder, tmp_path, groups):
    rank = Rank(recipe(moe_folder, dtype="bfloat16"), tmp_path)
    rank.perform(Restore())
    assert {t.dtype for t in rank.perform(Export(0)).weights.values()} == {torch.bfloat16}


def test_a_sample_that_differs_from_its_event_is_refused_by_name(dense_folder, tmp_path, groups):
    rank = Rank(recipe(dense_folder), tmp_path)
    rank.perform(Restore())
    good = command(tmp_path, 0, 0)
    ref = good.ranks[0][0][0]
    wrong = SampleRef(**{f: getattr(ref, f) for f in ref.__struct_fields__} | {"sampled": ref.sampled + 1})
    with pytest.raises(wire.SampleError, match=ref.attempt):
        rank.perform(Train(version=0, ranks=(((wrong,),),), divisor=1.0, versions=(0,)))
