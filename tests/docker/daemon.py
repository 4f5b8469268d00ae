"""A Docker daemon of the tests' own, in its own process group and folder. Ended by its pid, and its containers with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

BASE: Final = "debian"
"""The base image of test tasks, made from this machine's packages."""
_SCRIPT: Final = Path(__file__).with_name("base_image.sh")
_SECONDS: Final = 30.0


class Daemon:
    """dockerd on a socket below `root`, with its data there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = f"unix://{root / 'docker.sock'}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = ["dockerd", "--host", self.address, "--data-root", str(self.root / "data"), "--exec-root", str(self.root / "exec")]
        argv += ["--pidfile", str(self.root / "dockerd.pid"), "--bridge", "none"]
        with (self.root / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _SECONDS
        while self.call("version").returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.root / "dockerd.log").read_text(errors="replace")[-2000:])
            time.sleep(0.05)

    def call(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """The docker command on this daemon."""
        return subprocess.run(["docker", "-H", self.address, *argv], capture_output=True, text=True, timeout=60, check=False)

    def kill(self) -> None:
        """SIGKILL, as a crash; its containers go on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)
        # Its containerd dies with it; a pid that nobody reaps would keep the next one from starting.
        for name in ("dockerd.pid", "exec/containerd/containerd.pid"):
            (self.root / name).unlink(missing_ok=True)

    def stop(self) -> None:
        """End it and what it started, and remove its folder."""
        if left := self.call("ps", "-aq").stdout.split():
            self.call("rm", "-f", *left)
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(20)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in sorted((m for m in mounts if m.startswith(f"{self.root}/")), reverse=True):
            subprocess.run(["umount", "-l", place], check=False)
        shutil.rmtree(self.root)

    def make_base(self) -> None:
        done = subprocess.run(
            [str(_SCRIPT), BASE], env={**os.environ, "DOCKER_HOST": self.address}, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode or not self.call("images", "-q", BASE).stdout.strip():
            raise RuntimeError(f"no base image: {done.stderr}")


def missing() -> str:
    """Why no daemon can be started here; "" when one can."""
    if os.geteuid() != 0:
        return "needs root to start dockerd"
    lacks = [name for name in ("dockerd", "docker", "containerd", "runc", "dpkg", "apt-cache") if shutil.which(name) is None]
    return f"{', '.join(lacks)} not on PATH (Debian: apt-get install docker.io)" if lacks else ""
