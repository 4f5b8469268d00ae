"""The process that has Harbor loaded, and what must be true of its Python before anything starts."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec

from rl360.config import ConfigError, HarborAgent

log = logging.getLogger(__name__)

SIDE: Final = Path(__file__).with_name("harbor_side.py")
_CHECK_SECONDS: Final = 120.0
_TAIL: Final = 600
_INSTALL: Final = "make a Python >= 3.12 environment with `pip install 'rl360[harbor]'` and name its python in agent.harbor.python"
_ENV: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "off", "PYTHONDONTWRITEBYTECODE": "1"}


class _Found(msgspec.Struct):
    python: tuple[int, int, int]
    harbor: str
    problem: str


def check(section: HarborAgent) -> str:
    """The version of harbor that the section's Python has. Raises ConfigError: no such Python, too old, no harbor, no such agent."""
    python = section.python or sys.executable
    try:
        done = subprocess.run(
            [python, "-I", str(SIDE), "check", section.agent], env=environment(), capture_output=True, timeout=_CHECK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ConfigError(f"agent.harbor.python: {python} can't be run ({e}): {_INSTALL}") from None
    try:
        found = msgspec.json.decode(done.stdout.splitlines()[-1] if done.stdout else b"", type=_Found)
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip()[-300:]
        raise ConfigError(f"agent.harbor.python: {python} is no Python >= 3.12 with harbor ({said}): {_INSTALL}") from None
    return _judged(python, section.agent, found)


def _judged(python: str, agent: str, found: _Found) -> str:
    if found.python < (3, 12, 0):
        version = ".".join(map(str, found.python))
        raise ConfigError(f"agent.harbor.python: {python} is Python {version}, and harbor needs 3.12: {_INSTALL}")
    if not found.harbor:
        raise ConfigError(f"agent.harbor.python: {python} has no harbor: {_INSTALL}")
    if found.problem:
        raise ConfigError(f'agent.harbor.agent: "{agent}" of harbor {found.harbor} {found.problem}; use terminus-2, or harness openai_url')
    return found.harbor


def environment() -> dict[str, str]:
    """What Harbor's Python is told: nothing of this process's secrets."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, **_ENV}


class Nursery:
    """Harbor's Python with everything imported, from which one child an attempt is forked. Safe for many threads."""

    def __init__(self, section: HarborAgent, log_file: Path) -> None:
        self._section, self._log_file = section, log_file
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def child(self) -> socket.socket:
        """A socket to a new child: it dies when this end is closed. A nursery that died is started again."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        return ours

    def said(self) -> str:
        """The end of its log."""
        return self._log_file.read_text(errors="replace")[-_TAIL:].strip() if self._log_file.is_file() else ""

    def close(self) -> None:
        """End the process; its children die with it."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        if self._process is not None:
            log.warning("the Harbor process ended with status %s and is started again; see %s", self._process.returncode, self._log_file)
        self._stop()
        self._control, theirs = socket.socketpair()
        argv = [self._section.python or sys.executable, "-I", str(SIDE), "nurse", str(theirs.fileno()), self._section.agent]
        with theirs, self._log_file.open("ab") as out:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None
