"""The steps of one attempt: each has an agent and a verifier of its own, in a fresh sandbox with the workdir of the one before.

Harbor keeps one container and starts its agent anew with each step's instruction. Here the session stays, each step is a
conversation of its own in it, and the next step gets the workdir as the agent left it: taken before the verifier ran, so
that no test leaves a trace. What an agent leaves outside its workdir, and its processes, end with its step.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final

from rl360.agents.artifacts import Copying, copy
from rl360.agents.staging import Staged, size_of
from rl360.agents.tasks import MAX_BYTES, Task
from rl360.agents.verify import Verdict
from rl360.bus.events import StepVerdict

_BYTES_A_FILE: Final = 4096


def over(task: Task, reward: float) -> bool:
    """Whether a step's reward ends the task: it is below the step's `min_reward`."""
    return task.min_reward is not None and reward < task.min_reward


def combined(task: Task, verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a whole task: of one step as it is, of several the mean of the verified ones, or the last one's.

    A step that was not reached has no verdict, and so no part in it (S12).
    """
    if not task.steps:
        return verdicts[0]
    rewards = [v.reward for v in verdicts]
    reward = rewards[-1] if task.final_reward else sum(rewards) / len(rewards)
    steps = [StepVerdict(step=s.step, reward=v.reward, receipt=v.receipt) for s, v in zip(task.steps, verdicts, strict=False)]
    return replace(verdicts[-1], reward=reward, steps=tuple(steps))


class Walk:
    """Where an attempt is on its way through the steps. A task of one step is its own only step."""

    def __init__(self, task: Task, staged: Staged, scratch: Path) -> None:
        self._task, self._scratch = task, scratch
        self._steps = tuple(zip(task.steps, staged.steps, strict=True)) if task.steps else ((task, staged),)
        self._verdicts: list[Verdict] = []
        self._workdir = staged.environment
        self._number = 0

    @property
    def number(self) -> int:
        return self._number

    @property
    def last(self) -> bool:
        return self._number == len(self._steps) - 1

    def current(self) -> tuple[Task, Staged]:
        """The step and its files: `environment` is the whole workdir that it starts with."""
        task, staged = self._steps[self._number]
        if not task.step:
            return task, staged
        folder = self._folder("start")
        for source in (self._workdir, staged.environment):
            if source is not None:
                shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
        return task, replace(staged, environment=folder, size=size_of(folder))

    def leave(self, workdir: Path) -> None:
        """Keep the workdir of a dead agent for the next step. Devices and what is beyond 256 MiB or 65,536 files stay behind."""
        if not self.last:
            kept, copying = self._folder("left"), Copying(entries=MAX_BYTES // _BYTES_A_FILE, bytes=MAX_BYTES, links=True)
            for entry in sorted(workdir.iterdir()):
                name = PurePosixPath(entry.name)
                copy(workdir, name, kept, name, copying)
            self._workdir = kept

    def judged(self, verdict: Verdict) -> bool:
        """Take a step's verdict; whether another step follows."""
        task, _ = self._steps[self._number]
        self._verdicts.append(verdict)
        if self.last or over(task, verdict.reward):
            return False
        self._number += 1
        return True

    def verdict(self) -> Verdict:
        return combined(self._task, self._verdicts)

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _folder(self, what: str) -> Path:
        folder = self._scratch / f"{self._number}-{what}"
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self._scratch.chmod(0o755)
        return folder
