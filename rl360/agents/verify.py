"""The strict line (S12, S17): a reward exists only if the verifier wrote it after the agent was dead.

The verifier runs in a fresh place: the task's tests read-only at /tests, an empty /logs/verifier, the agent's workdir.
Not covered: code of the agent's that the verifier itself runs has the verifier's rights; a task that runs such code
must not let it write to /logs/verifier.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.base import ExecResult, Sandbox, Sealed
from rl360.agents.staging import Staged
from rl360.agents.tasks import Task
from rl360.bus.blobs import digest_of
from rl360.bus.events import Boundary, Cause, Receipt, StepVerdict

MAX_REWARD_BYTES: Final = 64 << 10
CLOCK_GRAIN: Final = 0.05
"""Seconds by which a file's time may lie behind the clock: the kernel stamps files from a coarser one."""
_TAIL: Final = 600  # characters of the verifier's output in an error
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_FILES: Final = ("reward.json", "reward.txt")


@dataclass(frozen=True)
class Verdict:
    """What the verifier said, and the proof that it was the verifier."""

    reward: float
    low: float
    high: float
    receipt: Receipt
    steps: tuple[StepVerdict, ...] = ()  # of a task of several steps


@dataclass(frozen=True)
class Written:
    """A reward file as found: its name, value, digest of its bytes, and when it was last changed (unix seconds)."""

    file: str
    value: float
    digest: str
    at: float


def verify(sandbox: Sandbox, task: Task, staged: Staged, *, started: float, timeout: float) -> Verdict:
    """Run the task's test.sh and read its reward. `started` is now (unix seconds), `timeout` the verifier's clock.

    Kills what is left of the agent first. Raises InfraError(verifier, …) when there is no reward to trust; never a 0.
    """
    dead_at = sandbox.kill_all()
    logs = sandbox.root / "verifier"
    logs.mkdir(mode=0o700)
    kills = sandbox.oom_kills()
    run = Sealed(
        argv=("/bin/bash", "/tests/test.sh"),
        read_only={"/tests": staged.tests},
        writable={"/logs/verifier": logs},
        env=task.verifier_env,
    )
    result = sandbox.run_sealed(run, timeout)
    if result.timed_out:
        raise _error(Cause.TIMEOUT, f"test.sh was killed after its {timeout:.1f} s", result)
    written = read_reward(logs, started)
    if written is None and sandbox.oom_kills() > kills:
        raise _error(Cause.OUT_OF_MEMORY, "the memory limit killed the verifier before it wrote a reward", result)
    if written is None:
        raise _error(Cause.NO_REWARD, "test.sh wrote neither reward.txt nor reward.json in /logs/verifier", result)
    if not task.low <= written.value <= task.high:
        raise _error(Cause.BAD_REWARD, f"{written.file}: {written.value:g} is outside [{task.low:g}, {task.high:g}]", result)
    receipt = Receipt(
        file=written.file,
        file_digest=written.digest,
        verifier_digest=task.verifier_digest,
        exit_status=result.status,
        agent_dead_at=dead_at,
        written_at=written.at,
    )
    return Verdict(written.value, task.low, task.high, receipt)


def read_reward(logs: Path, started: float) -> Written | None:
    """The reward in a folder, None without one. Raises InfraError for one that can't be trusted.

    Two files must say the same. Links, pipes, shared and older files are `forged_reward`; what isn't a finite number,
    a JSON boolean included, is `bad_reward`.
    """
    found = [w for name in _FILES if (w := _read(logs, name, started))]
    if len({w.value for w in found}) > 1:
        raise _refuse(Cause.BAD_REWARD, f"reward.json says {found[0].value:g} and reward.txt {found[1].value:g}; write one of them")
    return found[0] if found else None


def _read(logs: Path, name: str, started: float) -> Written | None:
    try:
        fd = os.open(logs / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise _refuse(Cause.FORGED_REWARD, f"{name} is a link or a socket, not a file of the verifier's") from None
        raise
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise _refuse(Cause.FORGED_REWARD, f"{name} is not a plain file with one name")
        if info.st_ctime < started - CLOCK_GRAIN:
            raise _refuse(Cause.FORGED_REWARD, f"{name} was there {started - info.st_ctime:.2f} s before the verifier started")
        data = os.read(fd, MAX_REWARD_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_REWARD_BYTES:
        raise _refuse(Cause.BAD_REWARD, f"{name} is larger than {MAX_REWARD_BYTES} bytes")
    value = _from_json(data) if name.endswith(".json") else _from_text(data)
    return Written(name, value, digest_of(data), info.st_ctime)


def _from_text(data: bytes) -> float:
    text = data.decode("utf-8", errors="replace").strip()
    if not _NUMBER.fullmatch(text):
        raise _refuse(Cause.BAD_REWARD, f"reward.txt must hold one finite number, not {text[:80]!r}")
    return _finite(float(text), "reward.txt")


def _from_json(data: bytes) -> float:
    """A number, or an object with the number under "reward"."""
    try:
        parsed: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _refuse(Cause.BAD_REWARD, f"reward.json is not valid JSON: {e}") from None
    if isinstance(parsed, dict):
        parsed = cast(dict[str, Any], parsed).get("reward")
    if isinstance(parsed, bool) or not isinstance(parsed, int | float):
        raise _refuse(Cause.BAD_REWARD, f'reward.json must hold a number, or {{"reward": number}}, not {str(parsed)[:80]!r}')
    return _finite(parsed, "reward.json")


def _finite(value: float, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refuse(Cause.BAD_REWARD, f"{name}: {number} is not finite")
    return number


def _refuse(cause: Cause, why: str) -> InfraError:
    return InfraError(Boundary.VERIFIER, cause, why, exception="RewardRefused")


def _error(cause: Cause, why: str, result: ExecResult) -> InfraError:
    said = f"; exit status {result.status}; it said: {result.output[-_TAIL:].strip() or 'nothing'}"
    return InfraError(Boundary.VERIFIER, cause, why + said, exception="VerifierError")
