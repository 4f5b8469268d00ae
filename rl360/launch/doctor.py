"""`rl360 doctor`: what this machine can run, each line with its remedy."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rl360.bus import nats_server
from rl360.bus.connection import BusError

_MIN_DISK = 2 << 30  # bytes


class Problem(Exception):
    """A check failed; the message is the remedy."""


def doctor() -> int:
    """Print a line a check; 1 when one failed."""
    failed = 0
    for name, check in CHECKS.items():
        try:
            print(f"ok       {name}: {check()}")
        except Problem as e:
            failed += 1
            print(f"PROBLEM  {name}: {e}")
    return 1 if failed else 0


def _python() -> str:
    return sys.version.split()[0]


def _cores() -> str:
    return f"{len(os.sched_getaffinity(0))} cores"


def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free
    if free < _MIN_DISK:
        raise Problem(f"{free >> 20} MiB free here; a run needs about 2 GiB")
    return f"{free >> 30} GiB free here"


def _nats() -> str:
    try:
        path = nats_server.binary()
    except BusError as e:
        raise Problem(str(e)) from None
    return subprocess.run([str(path), "--version"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _module(name: str, extra: str) -> Callable[[], str]:
    def check() -> str:
        if not _found(name):
            raise Problem(f"{name} is missing: pip install 'rl360[{extra}]'")
        return "installed"

    return check


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False


def _bwrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise Problem("bubblewrap is missing: apt-get install bubblewrap")
    command = [path, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise Problem(f"bwrap can't make namespaces here ({done.stderr.strip()}); allow unprivileged user namespaces, or run as root")
    return path


def _cgroups() -> str:
    from rl360.agents.sandbox.cgroups import describe

    return describe()


def _docker() -> str:
    """A daemon is optional: where there is none, this line says so and is no problem."""
    if not _found("docker"):
        return "not used: pip install 'rl360[docker]' for sandbox.kind = \"docker\""
    from rl360.agents.sandbox.docker.engine import Engine, NoDaemon, address, describe

    try:
        return describe(Engine(address()))
    except NoDaemon as e:
        return f"not used: {e}"


CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "cpu": _cores,
    "disk": _disk,
    "nats-server": _nats,
    "gateway (smg)": _module("smg", "server"),
    "trainer (torch)": _module("torch", "trainer"),
    "trainer (megatron-core)": _module("megatron.core", "trainer"),
    "agent (mini-swe-agent)": _module("minisweagent", "agent"),
    "sandbox (bwrap)": _bwrap,
    "sandbox limits (cgroups)": _cgroups,
    "sandbox (docker)": _docker,
}
