"""A sandbox of containers. Whatever the agent does to its container, the verifier runs in a new one from the image.

The workdir is a volume, the only thing that both see. The daemon may be another machine's, but for `listen`: files go
in and out as archives, and nothing of the host is mounted.
"""

from __future__ import annotations

import re
import socket
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from rl360.agents.network import PORT, Network, proxy_env
from rl360.agents.outcomes import InfraError, boundary
from rl360.agents.sandbox.base import LABEL, ExecResult, Limits, Sealed
from rl360.agents.sandbox.docker import command as commands
from rl360.agents.sandbox.docker.archive import MAX_BYTES, HostileArchive, pack, unpack
from rl360.agents.sandbox.docker.bounded import bound_container
from rl360.agents.sandbox.docker.container import PUBLIC, Making, create
from rl360.agents.sandbox.docker.engine import ATTEMPT, CALL_SECONDS, LEASE, RUN, SANDBOX, Engine
from rl360.agents.sandbox.docker.images import Images, Source
from rl360.agents.sandbox.docker.inside import listen_in, oom_kills
from rl360.agents.sandbox.docker.sealed import until_end
from rl360.agents.sandbox.docker.stream import hijack
from rl360.agents.sandbox.egress import Egress
from rl360.agents.sandbox.leases import Lease, remove_tree
from rl360.agents.tasks import Task
from rl360.bus.events import Boundary, Cause

_KILL_SECONDS: Final = 10
_NETWORK: Final = {"": "none", "no-network": "none", "allowlist": "none", "public": PUBLIC}
_SEALED: Final = 'exec "$@" 2>&1'
_SEALED_WAITING: Final = f'unset {LABEL}; read -r _; exec "$@" 2>&1 </dev/null'
"""It starts once the proxy listens."""


class DockerSandbox:
    """`files` is copied into the workdir (None: the image has them). `read_only` are folders that the agent sees."""

    def __init__(
        self,
        engine: Engine,
        images: Images,
        lease: Lease,
        name: str,
        *,
        run: str,
        limits: Limits,
        task: Task,
        source: Source,
        files: Path | None,
        start_timeout: float,
        read_only: Mapping[str, Path] | None = None,
    ) -> None:
        self.id = name
        self._engine, self._images, self._lease, self._limits = engine, images, lease, limits
        self._task, self._source, self._files, self._timeout = task, source, files, start_timeout
        self._read_only = read_only or {}
        self._labels = {RUN: run, ATTEMPT: name, LEASE: lease.name, SANDBOX: name}
        self._name = re.sub(r"[^a-zA-Z0-9_.-]", "_", f"rl360-{lease.name}-{name}")
        self.root = lease.folder / name
        self.workdir = self.root / "app"
        self._volumes: list[str] = []
        self._containers: list[str] = []
        self._image = self._container = ""
        self._held: commands.Held | None = None
        self._killing = threading.Lock()
        self._aborted = self._killed = False
        self._dead_at: float | None = None
        self._oom = 0
        self._egresses: list[Egress] = []

    # ------------------------------------------------------------------------------------------------ life

    def start(self) -> None:
        end = time.monotonic() + self._timeout
        with self._engine.typed("the sandbox can't be started"):
            self._engine.reach(end)
            self._lease.open(self.id, None, engine=self._engine.address)
            self._image = self._images.get(self._source, end - time.monotonic())
            self.workdir = Path(self._volume("app"))
            argv = (*commands.FIRST, self._lease.label(self.id), commands.FIRST_SCRIPT)
            network = self._task.network
            volumes = {self._task.workdir: self._volumes[0]}
            made = self._make("", argv, self._task.env, network, volumes, held=True)
            for inside, folder in {**({self._task.workdir: self._files} if self._files else {}), **self._read_only}.items():
                self._copy_in(made, folder, inside)
            bound_container(self._engine, made, self._limits.storage_mb << 20, end - time.monotonic())
            keeper, _ = hijack(self._engine.address, f"/containers/{made}/attach?stream=1&stdin=1", None, CALL_SECONDS)
            self._held = commands.Held(self._engine, made, keeper, self._lease.label(self.id))
            self._engine.api.start(made)
            self._held = replace(self._held, pid=int(self._engine.state(made)["Pid"]))  # known from now on without the daemon
            self._container = made
            if network.filtered:
                self._open(made, network)
        if self._killed:
            self.abort()
            raise self._cancelled()

    def exec(self, command: str, timeout: float, env: Mapping[str, str] | None = None) -> ExecResult:
        held = self._started()
        with self._explained(held.container):
            return commands.run(held, command, timeout, env or {}, self._task.workdir)

    def listen(self) -> socket.socket:
        held = self._started()
        with self._explained(held.container):
            return listen_in(held.pid, held.label)

    def kill_commands(self) -> None:
        self._started().kill_commands()

    def kill_all(self) -> float:
        made = self._started(killed=True).container
        with self._engine.typed("the sandbox can't be killed"):
            self._kill(made)
        self._close_egresses()
        return self._dead_at or time.time()

    def run_sealed(self, run: Sealed, timeout: float) -> ExecResult:
        if self._dead_at is None:
            raise InfraError(Boundary.SANDBOX, Cause.UNKNOWN, "a sealed run before kill_all: something of the agent's may live")
        if self._aborted:
            raise self._cancelled()
        end = time.monotonic() + timeout
        with self._engine.typed("the sealed run failed"):
            number = len(self._containers)
            empty = {inside: self._named(f"w{number}-{i}") for i, inside in enumerate(run.writable)}
            volumes = {self._task.workdir: self._volumes[0], **empty}
            network = self._task.verifier_network
            argv = ("/bin/bash", "-c", _SEALED_WAITING if network.filtered else _SEALED, "sealed", *run.argv)
            env = {**run.env, LABEL: self._lease.label(self.id)} if network.filtered else run.env
            made = self._make(f"-v{number}", argv, env, network, volumes, empty=frozenset(run.writable), asks=network.filtered)
            for inside, folder in run.read_only.items():
                self._copy_in(made, folder, inside)
            bound_container(self._engine, made, self._limits.storage_mb << 20, end - time.monotonic())
            begin = (lambda: self._open(made, network)) if network.filtered else None
            result = until_end(self._engine, made, end - time.monotonic(), begin)
            self._close_egresses()
            self._oom += int(bool(self._engine.state(made)["OOMKilled"]))
            if self._aborted:
                raise self._cancelled()
            for inside, folder in run.writable.items():
                self._copy_out(made, inside, folder)
            self._engine.remove_container(made)
            return result

    def oom_kills(self) -> int:
        return self._oom + (oom_kills(self._held.pid) if self._held is not None and self._dead_at is None else 0)

    def abort(self) -> None:
        self._aborted = self._killed = True
        with self._engine.typed("the sandbox can't be killed"):
            for made in tuple(self._containers):
                self._kill(made)

    def close(self) -> None:
        with boundary(Boundary.SANDBOX), self._engine.typed("the sandbox can't be removed"):
            self._aborted = self._killed = True
            if self._held is not None:
                self._held.end()
                self._held.keeper.close()
            self._close_egresses()
            for made in self._containers:
                self._engine.remove_container(made)
            for volume in self._volumes:
                self._engine.remove_volume(volume)
            remove_tree(self.root)

    # ------------------------------------------------------------------------------------------------ parts

    def _make(
        self,
        suffix: str,
        argv: tuple[str, ...],
        env: Mapping[str, str],
        network: Network,
        volumes: Mapping[str, str],
        *,
        empty: frozenset[str] = frozenset(),
        held: bool = False,
        asks: bool = False,
    ) -> str:
        if self._aborted:
            raise self._cancelled()
        making = Making(
            name=self._name + suffix,
            image=self._image,
            argv=argv,
            labels=self._labels,
            env={**env, **proxy_env(PORT)} if network.filtered else env,
            cwd=self._task.workdir,
            limits=self._limits,
            network=self._network(network),
            volumes=volumes,
            empty=empty,
            held=held or asks,
            init=not held,
        )
        self._containers.append(making.name)  # before it is made: what is made half-way is removed too
        try:
            return create(self._engine, making)
        except self._engine.errors.ImageNotFound:
            self._images.forget(self._source)
            raise

    def _volume(self, suffix: str) -> str:
        """Make a volume; its folder on the daemon's machine."""
        return str(self._engine.api.inspect_volume(self._named(suffix))["Mountpoint"])

    def _named(self, suffix: str) -> str:
        name = f"{self._name}-{suffix}"
        self._volumes.append(name)
        self._engine.api.create_volume(name, labels=self._labels)
        return name

    def _copy_in(self, made: str, folder: Path, inside: str) -> None:
        with tempfile.TemporaryFile() as tar:
            pack(folder, inside, tar)
            tar.seek(0)
            if not self._engine.api.put_archive(made, "/", tar):
                raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"{inside} could not be copied into the sandbox")

    def _copy_out(self, made: str, inside: str, folder: Path) -> None:
        chunks, _ = self._engine.api.get_archive(made, inside)
        with tempfile.TemporaryFile() as tar:
            try:
                for chunk in chunks:
                    tar.write(chunk)
                    if tar.tell() > MAX_BYTES:
                        raise HostileArchive(f"more than {MAX_BYTES >> 20} MiB")
                tar.seek(0)
                unpack(tar, folder)
            except HostileArchive as e:
                raise InfraError(Boundary.VERIFIER, Cause.FORGED_REWARD, f"{inside}: {e}", exception="HostileArchive") from None

    def _kill(self, made: str) -> None:
        """Kill a container and see that it ended; one that ended already, or never was, is fine."""
        with self._killing:
            held = self._held if made == self._container else None
            counted = 0
            if held is not None:
                self._killed = True
                if self._dead_at is not None:
                    return
                counted = oom_kills(held.pid)
                held.end()  # an agent can keep the daemon from answering as long as it lives
            try:
                self._engine.api.kill(made)
            except self._engine.errors.NotFound:
                return
            except self._engine.errors.APIError as e:
                if e.status_code != 409:  # it does not run
                    raise
            self._engine.api.wait(made, timeout=_KILL_SECONDS, condition="not-running")
            if held is not None:
                self._oom += max(counted, int(bool(self._engine.state(made)["OOMKilled"])))
                self._dead_at = time.time()

    def _started(self, *, killed: bool = False) -> commands.Held:
        if not self._container or self._held is None:
            raise InfraError(Boundary.SANDBOX, Cause.LOST, "the sandbox was not started")
        if self._killed and not killed:
            raise self._cancelled()
        return self._held

    @contextmanager
    def _explained(self, made: str) -> Generator[None]:
        """A failure inside is explained by what became of the container, where that is known."""
        try:
            with self._engine.typed("a command failed"):
                yield
        except InfraError as error:
            raise self._gone(made, error) from error
        if self._killed:
            raise self._cancelled()

    def _gone(self, made: str, error: InfraError) -> InfraError:
        if self._killed:
            return self._cancelled()
        try:
            state = self._engine.state(made)
        except (self._engine.errors.DockerException, OSError) as e:
            return InfraError(Boundary.SANDBOX, Cause.LOST, f"the Docker daemon lost the sandbox: {e}", exception=type(e).__name__)
        if state["Running"]:
            return error
        if state["OOMKilled"]:
            return InfraError(Boundary.SANDBOX, Cause.OUT_OF_MEMORY, "the memory limit killed the sandbox's first process")
        why = f"the sandbox's container ended with status {state['ExitCode']} {state['Error']}".strip()
        return InfraError(Boundary.SANDBOX, Cause.LOST, why)

    def _network(self, network: Network) -> str:
        if network.mode not in _NETWORK:
            why = f"task {self._task.name!r}: network_mode {network.mode!r}: this sandbox offers {', '.join(filter(None, _NETWORK))}"
            raise InfraError(Boundary.SANDBOX, Cause.BAD_TASK, why)
        return _NETWORK[network.mode]

    def _open(self, made: str, network: Network) -> None:
        """Let a started container reach the hosts of its allowlist, before anything of its own runs."""
        listener = listen_in(int(self._engine.state(made)["Pid"]), self._lease.label(self.id), PORT)
        self._egresses.append(Egress(listener, network.allowed, self.id))

    def _close_egresses(self) -> None:
        while self._egresses:
            self._egresses.pop().close()

    def _cancelled(self) -> InfraError:
        return InfraError(Boundary.SANDBOX, Cause.CANCELLED, "the sandbox was killed by its runner")
