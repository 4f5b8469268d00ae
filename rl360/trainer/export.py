"""`rl360 export`: a checkpoint as a folder in Hugging Face layout, which transformers loads with equal logits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rl360 import config
from rl360.trainer import checkpoints
from rl360.trainer.checkpoints import Checkpoint, CheckpointError


def export_hf(source: Path, out: Path) -> Checkpoint:
    """Write `out`: config.json, tokenizer files and model.safetensors. `source`: a checkpoint, or a run (its newest one).

    Returns the checkpoint that was used. Raises CheckpointError; FileExistsError when `out` is there and not empty.
    """
    checkpoint = find(source)
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name a folder that is yet to be made")
    aside = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoints.copy_hf_files(checkpoint.hf, aside)
    _write_weights(checkpoint, aside / "model.safetensors")
    if out.exists():
        out.rmdir()
    os.replace(aside, out)
    return checkpoint


def find(source: Path) -> Checkpoint:
    """The checkpoint that a path names: its own folder, or the newest of a run's folder. Raises CheckpointError."""
    if (source / checkpoints.MANIFEST).exists():
        return checkpoints.verify(source)
    root = source / checkpoints.FOLDER if (source / checkpoints.FOLDER).is_dir() else source
    found = checkpoints.latest(root)
    if found.passed_over:
        raise CheckpointError(f"{found.passed_over[0]} (or name an older checkpoint)")
    if found.checkpoint is None:
        raise CheckpointError(f"{source}: neither a checkpoint nor a run with one; checkpoints lie in RUN/{checkpoints.FOLDER}/step-…")
    return found.checkpoint


def _write_weights(checkpoint: Checkpoint, path: Path) -> None:
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    from rl360.trainer import dist_state
    from rl360.trainer.distributed import process_groups
    from rl360.trainer.policy import Policy
    from rl360.trainer.spec import ModelSpec

    with process_groups():
        policy = Policy(ModelSpec.read(checkpoint.hf), config.Trainer(), temperature=1.0)
        weights = dist_state.load_weights(policy, checkpoint)
        save_file(dict(policy.export(weights)), path, metadata={"format": "pt"})
