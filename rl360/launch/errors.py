"""Errors of input: what the command line shows as one line instead of a traceback."""

from __future__ import annotations

from rl360.agents.tasks import TaskError
from rl360.bus.blobs import BlobError
from rl360.bus.connection import BusError
from rl360.config import ConfigError
from rl360.engines.client import EngineError
from rl360.extras import MissingExtra
from rl360.journal.source import JournalError
from rl360.launch.supervisor import RunFailed
from rl360.trainer.checkpoints import CheckpointError
from rl360.trainer.spec import ModelError


def input_errors() -> tuple[type[Exception], ...]:
    return (
        ConfigError,
        EngineError,
        MissingExtra,
        BusError,
        JournalError,
        BlobError,
        TaskError,
        CheckpointError,
        ModelError,
        OSError,  # names the file itself: unreadable, a folder, a full disk
        RunFailed,
    )
