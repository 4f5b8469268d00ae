"""A real /bin/sh over a task's folder: its /app and /logs stand in a temporary folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


class Shell:
    def __init__(self, task: Path, root: Path) -> None:
        self.task, self.root = task, root
        self.app, self.logs = root / "app", root / "logs" / "verifier"
        self.logs.mkdir(parents=True)
        shutil.copytree(task / "environment", self.app, ignore=shutil.ignore_patterns("Dockerfile"))

    def run(self, command: str) -> str:
        """What an agent sees of a command."""
        done = subprocess.run(["sh", "-c", command], cwd=self.app, capture_output=True, text=True, timeout=20)
        return (done.stdout + done.stderr).strip() or "(no output)"

    def script(self, name: str) -> None:
        """Run a script of the task with its absolute paths moved below the root."""
        text = (self.task / name).read_text().replace("/logs/verifier", str(self.logs)).replace("cd /app", f"cd {self.app}")
        subprocess.run(["sh"], input=text, text=True, timeout=20, cwd=self.root)

    def reward(self) -> float:
        self.script("tests/test.sh")
        return float((self.logs / "reward.txt").read_text())
