"""Model and optimizer to disk and back, in megatron's distributed format (torch_dist). `checkpoints.py` has the folder around it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rl360.trainer import platform as _megatron_importable  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import torch as torch_format

from rl360.trainer.checkpoints import Checkpoint, CheckpointError, aside

_STEPS: Final = "optimizer_steps"

logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False  # torch's telemetry, hundreds of lines a checkpoint at DEBUG


class Trained(Protocol):
    """What a checkpoint holds: a model and its optimizer."""

    @property
    def module(self) -> Any: ...

    @property
    def optimizer(self) -> Any: ...

    def parameters(self) -> Iterator[tuple[str, Tensor]]: ...


class _InProcess(torch_format.TorchDistSaveShardedStrategy):
    """megatron's format, written by this process.

    megatron's own writer starts a manager process, which imports the whole program again (9 s), and forks writers out of a
    process that has threads.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        by_key, _, _ = torch_format._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)  # pyright: ignore[reportPrivateUsage]
        dcp_save(
            torch_format.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=torch_format.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def write(trained: Trained, root: Path, step: int) -> None:
    """Write model and optimizer aside; `checkpoints.commit` completes it. All ranks call it, in the platform."""
    folder = aside(root, step)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "weights").mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(trained, loading=False), str(folder / "weights"), _InProcess("torch_dist", 1))


def load(trained: Trained, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights and optimizer state into place. All ranks call it. Raises CheckpointError."""
    _make_room(trained.optimizer)
    state = _read(_state(trained, loading=True), checkpoint)
    trained.module.load_state_dict(state["model"])
    steps = float(state.get(_STEPS, 0.0))  # not in checkpoints of the first release, whose one layout needs no help
    _tell_steps(state["optimizer"], steps)
    with torch.no_grad():
        trained.optimizer.load_state_dict(state["optimizer"])
    for part in adams(trained.optimizer) if steps else ():
        for moments in part.state.values():
            moments["step"] = torch.tensor(steps, device=moments["exp_avg"].device)


def _make_room(optimizer: Any) -> None:
    """megatron's distributed optimizer asks torch's Adam for its step before it loads: a fresh one has none."""
    for part in adams(optimizer):
        for group in part.param_groups:
            for parameter in group["params"]:
                if not part.state[parameter]:
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    part.state[parameter] = {**moments, "step": torch.tensor(0.0, device=parameter.device)}


def _tell_steps(state: Any, steps: float) -> None:
    """Beside each parameter's moments. megatron keeps Adam's step as rank 0 knows it, by parameters that other ranks may lack."""
    if isinstance(state, dict):
        if "exp_avg" in state and steps:
            state["step"] = torch.tensor(steps)
        for part in list(state.values()):
            _tell_steps(part, steps)


def _steps(optimizer: Any) -> float:
    """Optimizer steps made, the same for every parameter."""
    return max((float(moments["step"]) for part in adams(optimizer) for moments in part.state.values()), default=0.0)


def adams(optimizer: Any) -> list[torch.optim.Adam]:
    """torch's own inside megatron's optimizers; none when Transformer Engine or Apex bring theirs."""
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [part for part in parts if isinstance(part, torch.optim.Adam)]  # AdamW is one too


def load_weights(trained: Trained, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """A checkpoint's weights by megatron name, without touching the model. All ranks call it. Raises CheckpointError."""
    sharded = trained.module.sharded_state_dict(metadata=_metadata())
    dict_list_map_inplace(_into_fresh, sharded)
    held = _read({"model": sharded}, checkpoint)["model"]
    return {name: held[name] for name, _ in trained.parameters()}


def _into_fresh(entry: Any) -> Any:
    """megatron reads into the tensors that it is given: into fresh ones then, not into the live model."""
    if not isinstance(entry, ShardedTensor | ShardedTensorFactory) or entry.data is None:
        return entry
    return replace(entry, data=torch.empty_like(entry.data))


def _state(trained: Trained, *, loading: bool) -> dict[str, Any]:
    model = trained.module.sharded_state_dict(metadata=_metadata())
    optimizer = trained.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_metadata())
    return {"model": model, "optimizer": optimizer, _STEPS: _steps(trained.optimizer)}


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "dp_reshardable",  # each rank writes its own part
    }


def _read(state: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], dist_checkpointing.load(state, str(checkpoint.weights)))
    except (CheckpointingException, CheckpointException, KeyError) as e:
        why = str(e).strip().splitlines()[0]
        raise CheckpointError(f"checkpoint {checkpoint.path}: doesn't fit this policy ({why}): start from the policy it was made of") from e
