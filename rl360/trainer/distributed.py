"""The trainer's ranks: rank 0 in the worker, the others as its children; commands go by broadcast.

Rank 0 sends msgpack in uint8 tensors over a group of its own. A rank waits for the next command as long as rank 0 lives: it is killed
with rank 0 (PR_SET_PDEATHSIG), and a connection that ends wakes it too. Inside a command every collective has a deadline.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from rl360.config import Config, Trainer
from rl360.trainer import commands, expert_lines
from rl360.trainer.platform import platform

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rl360.trainer.rank import Answer, Rank

log = logging.getLogger(__name__)

_COLLECTIVE: Final = timedelta(minutes=10)
"""A collective inside a command that takes longer has lost a rank."""
_BETWEEN: Final = timedelta(days=7)
"""Between two commands there may be hours of rollouts."""
_MEETING: Final = "meeting"
_JOB: Final = "job.json"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a child rank is told when it starts. `folder`: the run's."""

    config: Config
    folder: str


@contextmanager
def process_groups(rank: int = 0, trainer: Trainer | None = None, meeting: Path | None = None) -> Generator[None]:
    """Join the trainer's process groups, inside the platform. `meeting`: a file that all ranks can write, for several ranks."""
    trainer = trainer or Trainer()
    world = trainer.ranks
    if (world > 1) != (meeting is not None):
        raise ValueError("several ranks need a file to meet at; one rank needs none")
    store: Any = dist.HashStore() if meeting is None else dist.FileStore(str(meeting), world)  # pyright: ignore[reportPrivateImportUsage]
    hook = sys.excepthook
    with platform(rank) as here:
        dist.init_process_group(here.backend, store=store, rank=rank, world_size=world, timeout=_COLLECTIVE)
        sys.excepthook = hook  # torch wraps it anew for each group, to prefix every line of an error
        try:
            parallel_state.initialize_model_parallel(
                trainer.tp,
                trainer.pp,
                context_parallel_size=trainer.cp,
                expert_model_parallel_size=trainer.ep,
                expert_tensor_parallel_size=1,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(0, force_reset_rng=True)  # no part of a step is random; megatron wants a seed
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


class Channel:
    """Commands from rank 0 to all ranks."""

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=_BETWEEN)

    def send(self, command: commands.Command) -> None:
        data = commands.encode(command)
        self._broadcast(torch.tensor([len(data)], dtype=torch.int64))
        self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self) -> commands.Command:
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        data = torch.zeros(int(size.item()), dtype=torch.uint8)
        self._broadcast(data)
        return commands.decode(data.numpy().tobytes())

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._group)


class Crew:
    """All ranks, as rank 0 commands them. Use it in one thread; the children are started before, see `start_children`."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._rank = Rank(config, folder)
        self.experts = self._rank.experts
        self._channel = Channel() if config.trainer.ranks > 1 else None

    def do(self, command: commands.Command) -> Answer:
        """Carry a command out on all ranks; returns rank 0's answer."""
        if self._channel is not None:
            self._channel.send(command)
        return self._rank.perform(command)


@dataclass(frozen=True)
class Child:
    """Another rank: its process, and the line for orders about experts."""

    process: subprocess.Popen[bytes]
    line: socket.socket


def start_children(config: Config, folder: Path, meeting: Path) -> list[Child]:
    """Start ranks 1, 2, …, each in a process group of its own. `meeting`: an empty folder of this life of the trainer.

    Call it from a thread that lives as long as the process: a child dies with the thread that made it.
    """
    (meeting / _JOB).write_bytes(msgspec.json.encode(Job(config=config, folder=str(folder))))
    return [_start_child(rank, meeting) for rank in range(1, config.trainer.ranks)]


def _start_child(rank: int, meeting: Path) -> Child:
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-m", "rl360.trainer.rank_process", str(meeting), str(os.getpid()), str(rank), str(fd)]
        return Child(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[fd]), ours)


def kill_children(children: list[Child]) -> None:
    """End the recorded children, with their process groups, and reap them."""
    for child in children:
        if child.process.poll() is None:
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait(10)
        child.line.close()


def meeting_file(meeting: Path) -> Path:
    """Where ranks of one life find each other."""
    return meeting / _MEETING


def rank_main(meeting: Path, rank: int, line: int) -> None:
    """A child rank: carry out commands until `Stop`, and orders that come by the socket `line` beside them."""
    job = msgspec.json.decode((meeting / _JOB).read_bytes(), type=Job)
    torch.set_num_threads(1)
    with process_groups(rank, job.config.trainer, meeting_file(meeting)):
        me, channel = Rank(job.config, Path(job.folder)), Channel()
        expert_lines.serve(socket.socket(fileno=line), me.experts)
        log.info("rank %d is ready", rank)
        while not isinstance(command := channel.receive(), commands.Stop):
            me.perform(command)
