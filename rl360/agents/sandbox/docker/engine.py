"""One Docker daemon: its address, its errors as typed ones, and what belongs to a lease on it.

Calls go through the `docker` SDK (extra `docker`); each thread has a client of its own.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.docker.bounded import release, same_mounts, why_not
from rl360.bus.events import Boundary, Cause
from rl360.extras import MissingExtra

log = logging.getLogger(__name__)

LEASE: Final = "rl360.lease"
SANDBOX: Final = "rl360.sandbox"
RUN: Final = "rl360.run"
ATTEMPT: Final = "rl360.attempt"
"""Labels of everything that a sandbox makes. They are part of the call that makes it, so nothing is ever without them."""

DEFAULT: Final = "unix:///var/run/docker.sock"
CALL_SECONDS: Final = 60.0
"""A daemon that says nothing for so long has hung."""

_ANONYMOUS: Final = 64
"""Characters of the name of a volume that an image asked for."""
_POLL: Final = 0.5
_SETTLE_SECONDS: Final = 5.0
"""A create that a dead runner asked for may still be under way for so long after its intent."""


class NoDaemon(ConnectionRefusedError):
    """No Docker daemon answers; the message has the remedy."""


class Engine:
    """A daemon by its address, `unix://PATH` or `tcp://HOST:PORT`. Safe for many threads."""

    def __init__(self, address: str) -> None:
        """Raises MissingExtra without the SDK, NoDaemon when nothing answers."""
        self.address = address
        self._local = threading.local()
        self._sdk = _sdk()
        self.quota = True
        """Whether the storage driver can bound what a container writes; learned when it refuses for the first time."""
        self.here = same_mounts(address)
        """Whether the daemon sees what this process mounts."""
        self.bounding = threading.Lock()
        self.unbounded: str | None = None
        """Why `bounded.py` can't bound what a container writes, "" when it can; None: not tried yet."""
        try:
            self.info: Mapping[str, Any] = self.api.info()
        except (self._sdk.errors.DockerException, OSError) as e:
            raise NoDaemon(
                f"no Docker daemon answers at {address} ({_short(e)}); start dockerd, or name another in DOCKER_HOST, "
                'or set sandbox.kind = "bwrap"'
            ) from None

    @property
    def types(self) -> Any:
        """The SDK's classes of mounts and limits."""
        return self._sdk.types

    @property
    def errors(self) -> Any:
        """The SDK's exceptions."""
        return self._sdk.errors

    @property
    def api(self) -> Any:
        """The SDK's low-level client of this thread."""
        if not hasattr(self._local, "api"):
            self._local.api = self._sdk.APIClient(base_url=self.address, version="auto", timeout=CALL_SECONDS)
        return self._local.api

    @contextmanager
    def typed(self, what: str) -> Generator[None]:
        """What the SDK raises inside leaves as an InfraError of the sandbox (S13)."""
        try:
            yield
        except InfraError:
            raise
        except Exception as e:
            raise InfraError(Boundary.SANDBOX, cause_of(e), f"{what}: {_short(e)}", exception=type(e).__name__) from e

    def reach(self, deadline: float) -> None:
        """Wait until the daemon answers, at most until `deadline` (monotonic seconds): one that restarts costs only what ran on it.

        Raises InfraError (sandbox/lost).
        """
        waited = False
        while True:
            try:
                self.api.ping()
            except OSError as e:
                if time.monotonic() + _POLL >= deadline:
                    why = f"no Docker daemon answered at {self.address} within the set-up's time: {_short(e)}"
                    raise InfraError(Boundary.SANDBOX, Cause.LOST, why, exception="NoDaemon") from None
                if not waited:
                    log.warning("the Docker daemon at %s does not answer; a sandbox waits for it", self.address)
                waited = True
                time.sleep(_POLL * (0.5 + random.random()))  # not all at once
            else:
                return

    def state(self, container: str) -> Mapping[str, Any]:
        """`State` of a container as the daemon inspects it: Running, ExitCode, OOMKilled, Error, Pid."""
        return self.api.inspect_container(container)["State"]

    def remove_container(self, name: str) -> None:
        """Kill and remove it, with its unnamed volumes; one that is gone is fine."""

        def remove() -> None:
            for mount in self.api.inspect_container(name)["Mounts"] if self.here else ():
                if len(mount.get("Name", "")) == _ANONYMOUS:
                    release(Path(mount["Source"]))
            self.api.remove_container(name, force=True, v=True)

        self._gone_is_fine(remove)

    def remove_volume(self, name: str) -> None:
        """One that is gone is fine."""

        def remove() -> None:
            if self.here:
                release(Path(self.api.inspect_volume(name)["Mountpoint"]))
            self.api.remove_volume(name, force=True)

        self._gone_is_fine(remove)

    def remove_lease(self, lease: str, sandboxes: Mapping[str, float]) -> None:
        """Remove every container and volume of a dead runner. `sandboxes` has the intents {sandbox: unix seconds}.

        Raises what the SDK raises: nothing is forgotten then, and the sweep comes again.
        """
        labels = {"label": f"{LEASE}={lease}"}
        while True:
            found = self.api.containers(all=True, filters=labels)
            for container in found:
                self.remove_container(container["Id"])
            seen = {c["Labels"].get(SANDBOX) for c in found}
            young = [s for s, at in sandboxes.items() if s not in seen and time.time() - at < _SETTLE_SECONDS]
            if not young:
                break
            time.sleep(0.1)
        for volume in self.api.volumes(filters=labels)["Volumes"] or ():
            self.remove_volume(volume["Name"])

    def _gone_is_fine(self, call: Callable[[], object]) -> None:
        try:
            call()
        except self._sdk.errors.NotFound:
            return
        except self._sdk.errors.APIError as e:
            if e.status_code != 409 or "already in progress" not in str(e):
                raise


def address() -> str:
    """Where the daemon is: DOCKER_HOST, else its usual socket."""
    return os.environ.get("DOCKER_HOST") or DEFAULT


def describe(engine: Engine) -> str:
    """One line for `rl360 doctor`."""
    info = engine.info
    pairs: list[tuple[str, str]] = info.get("DriverStatus") or []
    backing = dict(pairs).get("Backing Filesystem", "")
    why = "" if (info["Driver"], backing) == ("overlay2", "xfs") else why_not(engine)
    disk = f"; no limit of a container's disk ({why})" if why else ""
    storage = f"{info['Driver']} on {backing or 'its own'}, cgroup v{info.get('CgroupVersion', 1)}"
    return f"Docker {info['ServerVersion']} at {engine.address}, {storage}{disk}"


def sweep_lease(at: str, lease: str, sandboxes: Mapping[str, float]) -> None:
    """Remove what a dead runner left on the daemon at `at`. Raises OSError when it can't be done now."""
    try:
        Engine(at).remove_lease(lease, sandboxes)
    except (OSError, MissingExtra) as e:
        raise OSError(f"containers of {lease}: {e}") from e
    except Exception as e:
        raise OSError(f"containers of {lease}: {_short(e)}") from e


def cause_of(error: BaseException) -> Cause:
    """Cause of what the SDK raised, by its type and by the daemon's words."""
    said, kind = str(error).lower(), type(error).__name__
    if "no space left" in said or "disk quota" in said:
        return Cause.DISK_FULL
    if kind in ("APIError", "ImageNotFound"):
        return Cause.START_FAILED
    if kind in ("ReadTimeout", "ReadTimeoutError", "Timeout", "ConnectionError", "ProtocolError", "NotFound") or isinstance(error, OSError):
        return Cause.LOST
    return Cause.UNKNOWN


def _short(error: BaseException) -> str:
    explained = getattr(error, "explanation", None)
    return str(explained or error)[:600]


def _sdk() -> Any:
    try:
        return importlib.import_module("docker")
    except ModuleNotFoundError as e:
        raise MissingExtra('sandbox.kind = "docker"', e.name or "docker", "docker") from None
