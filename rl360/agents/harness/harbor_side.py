"""Harbor's side of `agent.harness = "harbor"`: a script for a Python >= 3.12 that has harbor, and nothing of RL360's.

`harbor_side.py check AGENT` says in JSON what this Python has. `harbor_side.py nurse FD AGENT` imports Harbor and the agent
once (6 s of CPU, litellm's for the most part), then forks a child for every socket that comes over FD. A child runs one Harbor trial: the
first line of its socket is the order, every command of the trial's goes back over it, and it dies when the socket closes.
Harbor's verifier is off: the place, the clock, the verifier and every reward are the runner's.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import dataclasses
import importlib
import importlib.metadata
import io
import json
import logging
import os
import signal
import socket
import sys
import tarfile
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import Any

_PR_SET_PDEATHSIG = 1
_CHUNK = 48 << 10  # characters of base64 in one command: an argument of a program may have 128 KiB
_LOADED = ("harbor.trial.single_step", "harbor.verifier.factory", "harbor.llms.lite_llm")  # no thread runs after them: a fork is safe
_FAR = 10 * 365 * 86400.0  # no clock of Harbor's ever runs out: S15


def check(agent: str) -> dict[str, Any]:
    """Versions of this Python and of harbor ("" without), and what is wrong with the agent ("": nothing)."""
    found: dict[str, Any] = {"python": list(sys.version_info[:3]), "harbor": "", "problem": ""}
    try:
        found["harbor"] = importlib.metadata.version("harbor")
        cls = agent_class(agent)
        installed = importlib.import_module("harbor.agents.installed.base").BaseInstalledAgent
        if issubclass(cls, installed):
            found["problem"] = "installs itself into the sandbox, which has no network"
    except importlib.metadata.PackageNotFoundError:
        pass
    except (ImportError, ValueError, AttributeError) as e:
        found["problem"] = f"can't be loaded: {e}"
    return found


def agent_class(agent: str) -> Any:
    """Harbor's own agent of that name, or `module:Class`."""
    config: Any = importlib.import_module("harbor.models.trial.config").AgentConfig
    factory: Any = importlib.import_module("harbor.agents.factory").AgentFactory
    return factory.get_agent_class_from_config(config(name=agent))


class Line:
    """The socket to the runner: a command out, what it did back. It is read by a thread, so that its end is always seen."""

    def __init__(self, sock: socket.socket) -> None:
        self._file = sock.makefile("rwb")
        self.order: dict[str, Any] = json.loads(self._file.readline() or b"{}")
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._count = 0
        threading.Thread(target=self._read, daemon=True).start()

    async def ask(self, **asked: Any) -> dict[str, Any]:
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._count += 1
            self._waiting[self._count] = answer
            self._file.write(json.dumps({"id": self._count, **asked}).encode() + b"\n")
            self._file.flush()
        return await asyncio.wrap_future(answer)

    def _read(self) -> None:
        try:
            for line in self._file:
                answer = json.loads(line)
                self._waiting.pop(answer["id"]).set_result(answer)
        finally:
            os.killpg(0, signal.SIGKILL)


def place_class() -> Any:
    """Harbor's environment over the runner's sandbox."""
    base: Any = importlib.import_module("harbor.environments.base")
    capabilities: Any = importlib.import_module("harbor.environments.capabilities").EnvironmentCapabilities

    class Place(base.BaseEnvironment):
        line: Line

        @staticmethod
        def type() -> str:
            return "rl360"

        @property
        def capabilities(self) -> Any:
            return capabilities(disable_internet=True)

        def _validate_definition(self) -> None:
            return

        async def start(self, force_build: bool) -> None:
            for mount in self._mounts:
                await self.exec(f"mkdir -p {base.shlex.quote(str(mount['target']))}")

        async def stop(self, delete: bool) -> None:
            return

        async def exec(
            self, command: str, cwd: str | None = None, env: Any = None, timeout_sec: int | None = None, user: str | int | None = None
        ) -> Any:
            if cwd:
                command = f"cd {base.shlex.quote(cwd)} && {command}"
            done = await self.line.ask(command=command, env=self._merge_env(env) or {}, timeout=timeout_sec)
            if done["timed_out"]:
                raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
            return base.ExecResult(stdout=done["output"], stderr="", return_code=done["status"])

        async def upload_file(self, source_path: Path | str, target_path: str) -> None:
            await self._put(Path(source_path).read_bytes(), f"cat > {base.shlex.quote(str(target_path))}")

        async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(str(source_dir), arcname=".")
            target = base.shlex.quote(str(target_dir))
            await self._put(packed.getvalue(), f"mkdir -p {target} && tar -xf - -C {target} --no-same-owner")

        async def download_file(self, source_path: str, target_path: Path | str) -> None:
            return  # logs of the agent's: its conversation is in the journal, and a policy could make them as large as it likes

        async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
            return

        async def _put(self, data: bytes, unpack: str) -> None:
            text, aside = base64.b64encode(data).decode(), f"{self.line.order['root']}/upload"
            await self.exec(f": > {aside}")
            for at in range(0, len(text), _CHUNK):
                await self.exec(f"printf %s {text[at : at + _CHUNK]} >> {aside}")
            result = await self.exec(f"base64 -d {aside} | ( {unpack} ); s=$?; rm -f {aside}; exit $s")
            if result.return_code:
                raise OSError(f"upload ended with {result.return_code}: {result.stdout}")

    return Place


def move_logs(root: str) -> None:
    """Below `root` instead of /: most of a sandbox is read-only, and /logs is the verifier's."""
    paths: Any = importlib.import_module("harbor.models.trial.paths").EnvironmentPaths
    moved: Any = paths._with_root(PurePosixPath(root))
    for field in dataclasses.fields(paths):
        setattr(paths, field.name, getattr(moved, field.name))

    def for_os(os: object) -> Any:
        return moved

    paths.for_os = staticmethod(for_os)


async def trial(line: Line) -> None:
    """One trial, as ordered: its result lies in TRIALS/trial/result.json."""
    order, models = line.order, importlib.import_module("harbor.models.trial.config")
    module: Any = sys.modules["__main__"]
    module.Place = type("Place", (place_class(),), {"line": line})
    move_logs(order["root"])
    await line.ask(command=f"mkdir -p {order['root']}", env={}, timeout=None)
    defaults = {"record_terminal_session": False} if order["agent"] == "terminus-2" else {}  # else it installs a recorder
    config = models.TrialConfig(
        task=models.TaskConfig(path=Path(order["task"])),
        trial_name="trial",
        trials_dir=Path(order["trials"]),
        agent=models.AgentConfig(
            name=order["agent"],
            model_name=order["model"],
            override_timeout_sec=_FAR,
            override_setup_timeout_sec=_FAR,
            kwargs={**defaults, **order["args"]},
        ),
        environment=models.EnvironmentConfig(import_path="__main__:Place"),
        verifier=models.VerifierConfig(disable=True),
    )
    ours: Any = await importlib.import_module("harbor.trial.trial").Trial.create(config)
    await ours.run()


def nurse(control: socket.socket, agent: str) -> None:
    """Fork a child for every socket that comes; end with the runner, and every child with this process."""
    agent_class(agent)
    for module in _LOADED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        said, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not said:
            os._exit(0)
        (fd,) = fds
        if os.fork() == 0:
            control.close()
            _child(socket.socket(fileno=fd), os.getppid())
        os.close(fd)


def _child(sock: socket.socket, parent: int) -> None:
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(status)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        line = Line(sock)
        signal.alarm(int(line.order["seconds"]))  # its own deadline, should the runner forget it
        log = os.open(line.order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= line.order["env"]
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        run: Coroutine[Any, Any, None] = trial(line)
        asyncio.run(run)
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "check":
        print(json.dumps(check(sys.argv[2])))
    else:
        nurse(socket.socket(fileno=int(sys.argv[2])), sys.argv[3])
