"""`rl360 export`: transformers loads the folder and computes the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from rl360 import config
from rl360.trainer import checkpoints, dist_state
from rl360.trainer.batch import Microbatch, pack, weigh
from rl360.trainer.checkpoints import CheckpointError
from rl360.trainer.distributed import process_groups
from rl360.trainer.export import export_hf
from rl360.trainer.policy import Policy

from .conftest import random_samples


def trained_run(folder, run) -> tuple[torch.Tensor, list[int]]:
    """A run with one checkpoint; log-probs of one sequence under its weights, and the sequence."""
    (run / "checkpoints").mkdir(parents=True)
    with process_groups():
        policy = Policy.from_hf(folder, config.Trainer(lr=1e-2), 1.0)
        samples, divisor = weigh(random_samples([30, 20]), "token_mean")
        policy.step([pack(Microbatch(samples))], divisor, version=0)
        dist_state.write(policy, run / "checkpoints", 0)
        checkpoints.commit(run / "checkpoints", step=0, version=1, event=b"", hf_source=folder)
        batch = pack(Microbatch((samples[0],)))
        return policy.logprobs([batch])[0], batch.ids.tolist()


@pytest.mark.parametrize("kind", ["dense_folder", "moe_folder"])
def test_transformers_loads_it_with_equal_logits(kind, tmp_path, request):
    import transformers

    folder = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "start"))
    (folder / "tokenizer.json").write_text("{}")
    expected, ids = trained_run(folder, tmp_path / "run")
    used = export_hf(tmp_path / "run", tmp_path / "out")
    assert used.manifest.version == 1
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    got = logp[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    rows = expected[:-1] != 0
    assert (got - expected[:-1])[rows].abs().max() < 1e-5
    start = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (start.lm_head.weight - model.lm_head.weight).abs().max() > 1e-4, "it is the trained policy"


def test_nothing_is_written_over_and_a_wrong_path_is_named(dense_folder, tmp_path):
    trained_run(dense_folder, tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(FileExistsError, match="out"):
        export_hf(tmp_path / "run" / "checkpoints" / "step-000000", tmp_path / "out")
    with pytest.raises(CheckpointError, match="neither"):
        export_hf(tmp_path / "out", tmp_path / "other")
    os.truncate(tmp_path / "run" / "checkpoints" / "step-000000" / "hf" / "config.json", 3)
    with pytest.raises(CheckpointError, match="step-000000"):
        export_hf(tmp_path / "run", tmp_path / "other")
    assert not (tmp_path / "other").exists()
