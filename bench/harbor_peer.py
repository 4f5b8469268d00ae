"""Harbor's side of bench/runner.py, for a Python that has harbor: trials of `nop` in an environment that does nothing.

For each number that comes on stdin it runs so many trials and prints the CPU seconds of one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial


class Nothing(BaseEnvironment):
    """Takes every file and command for done; what it gives back of /logs/verifier is a reward of 1."""

    @staticmethod
    def type() -> str:
        return "nothing"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        return

    async def start(self, force_build: bool) -> None:
        return

    async def stop(self, delete: bool) -> None:
        return

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        return

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        return

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        return

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        if "verifier" in str(source_dir):
            (Path(target_dir) / "reward.txt").write_text("1\n")

    async def exec(
        self, command: str, cwd: object = None, env: object = None, timeout_sec: object = None, user: object = None
    ) -> ExecResult:
        return ExecResult(stdout="", stderr="", return_code=0)


async def trials(task: Path, out: Path, n: int) -> None:
    for number in range(n):
        config = TrialConfig(
            task=TaskConfig(path=task),
            trial_name=f"t{time.time_ns()}-{number}",
            trials_dir=out,
            agent=AgentConfig(name="nop"),
            environment=EnvironmentConfig(import_path="__main__:Nothing"),
        )
        result = await (await Trial.create(config)).run()
        assert result.exception_info is None, result.exception_info
        assert result.verifier_result is not None
        assert result.verifier_result.rewards == {"reward": 1.0}, result.verifier_result


def main() -> None:
    logging.disable(logging.WARNING)
    task = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as out:
        for line in sys.stdin:
            before = time.process_time()
            asyncio.run(trials(task, Path(out), int(line)))
            print((time.process_time() - before) / int(line), flush=True)


if __name__ == "__main__":
    main()
