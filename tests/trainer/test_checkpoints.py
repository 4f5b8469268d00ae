"""Checkpoints: exact resume, complete or absent, damage is refused by name and passed over for the one before."""

from __future__ import annotations

import os

import pytest
import torch

from rl360 import config
from rl360.trainer import checkpoints, dist_state
from rl360.trainer.batch import pack, plan_batch, weigh
from rl360.trainer.checkpoints import Checkpoint, CheckpointError
from rl360.trainer.policy import Policy

from .conftest import random_samples, write_policy

TRAINER = config.Trainer(lr=1e-2, weight_decay=0.1)


def train(policy: Policy, step: int) -> float:
    samples, divisor = weigh(random_samples([20, 30, 14], seed=step), "token_mean")
    batches = [pack(m) for m in plan_batch(samples, dp=1, microbatch_tokens=64).ranks[0]]
    return policy.step(batches, divisor, version=step).grad_norm


def save(policy: Policy, root, folder, step: int) -> Checkpoint:
    dist_state.write(policy, root, step)
    return checkpoints.commit(root, step=step, version=step + 1, event=b"event of %d" % step, hf_source=folder)


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in policy.parameters()])


@pytest.fixture
def three(dense_folder, tmp_path, groups):
    """Three steps with a checkpoint each."""
    policy = Policy.from_hf(dense_folder, TRAINER, 1.0)
    for step in range(3):
        train(policy, step)
        save(policy, tmp_path, dense_folder, step)
    return policy


@pytest.mark.parametrize("kind", ["dense_folder", "moe_folder"])
def test_resume_is_exact_weights_and_optimizer(kind, tmp_path, groups, request):
    folder = request.getfixturevalue(kind)
    policy = Policy.from_hf(folder, TRAINER, 1.0)
    for step in range(3):
        train(policy, step)
    saved = save(policy, tmp_path, folder, 2)
    expected = [train(policy, step) for step in (3, 4)]
    again = Policy.from_hf(folder, TRAINER, 1.0)
    dist_state.load(again, checkpoints.verify(saved.path))
    assert [train(again, step) for step in (3, 4)] == expected
    assert torch.equal(weights(again), weights(policy))


def test_weights_of_an_older_version_are_read_without_touching_the_policy(three, tmp_path, dense_folder):
    before = weights(three)
    older = checkpoints.of_version(tmp_path, 2)
    assert older is not None
    held = dist_state.load_weights(three, older)
    assert torch.equal(weights(three), before)
    again = Policy.from_hf(dense_folder, TRAINER, 1.0)
    dist_state.load(again, older)
    assert all(torch.equal(held[name], p) for name, p in again.parameters())
    assert checkpoints.of_version(tmp_path, 9) is None


def test_the_newest_comes_with_its_event(three, tmp_path):
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is not None
    assert found.passed_over == ()
    manifest = found.checkpoint.manifest
    assert (manifest.step, manifest.version, manifest.event) == (2, 3, b"event of 2")
    assert (found.checkpoint.hf / "config.json").is_file()
    assert not list(found.checkpoint.hf.glob("*.safetensors"))


def test_no_checkpoint_is_no_error(tmp_path):
    assert checkpoints.latest(tmp_path / "nowhere") == checkpoints.Latest(None, ())


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped byte": lambda p: flip_a_byte(next((p / "weights").glob("*.distcp"))),
    "a cut file": lambda p: os.truncate(next((p / "weights").glob("*.distcp")), 1000),
    "a missing file": lambda p: (p / "weights" / "metadata.json").unlink(),
    "a missing manifest": lambda p: (p / "manifest.json").unlink(),
    "a damaged manifest": lambda p: os.truncate(p / "manifest.json", 20),
    "a newer format": lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text().replace('"format": 1', '"format": 2')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name_and_the_one_before_is_used(damage, three, tmp_path):
    path = tmp_path / "step-000002"
    DAMAGE[damage](path)
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.step == 1
    assert len(found.passed_over) == 1
    assert str(path) in found.passed_over[0]
    with pytest.raises(CheckpointError, match="step-000002"):
        checkpoints.verify(path)


def test_a_crash_while_writing_leaves_nothing_that_is_read(three, tmp_path):
    dist_state.write(three, tmp_path, 3)  # and no commit
    found = checkpoints.latest(tmp_path)
    assert found.checkpoint is not None
    assert (found.checkpoint.manifest.step, found.passed_over) == (2, ())


def test_a_step_made_again_keeps_the_damaged_folder_aside(three, tmp_path, dense_folder):
    DAMAGE["a flipped byte"](tmp_path / "step-000002")
    save(three, tmp_path, dense_folder, 2)
    assert checkpoints.latest(tmp_path).checkpoint is not None
    assert (tmp_path / "step-000002.damaged-1").is_dir()


def test_a_checkpoint_of_another_shape_is_refused(three, tmp_path, groups):
    folder = write_policy(tmp_path / "other", tied=False)
    other = Policy.from_hf(folder, TRAINER, 1.0)
    found = checkpoints.latest(tmp_path).checkpoint
    assert found is not None
    with pytest.raises(CheckpointError, match="doesn't fit"):
        dist_state.load(other, found)
