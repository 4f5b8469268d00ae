"""Which image a task runs in, and making it: pulled or built once a machine, whoever waits for it.

The task's own `docker_image` comes first, then its environment/Dockerfile, then the recipe's `sandbox.image`, into whose
workdir the task's files are copied. An image is used by its id, so a tag that moves changes nothing for who runs already.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import blake3

from rl360.agents.outcomes import InfraError
from rl360.agents.sandbox.docker.archive import pack
from rl360.agents.sandbox.docker.engine import Engine
from rl360.agents.tasks import digest_of_folder
from rl360.bus.events import Boundary, Cause

log = logging.getLogger(__name__)

BUILD_SECONDS: Final = 600.0
"""Of a build whose task names no `build_timeout_sec`, and of a pull."""
_AT_ONCE: Final = 2  # pulls and builds of one runner
_LOG_TAIL: Final = 800


@dataclass(frozen=True)
class Source:
    """Where an image comes from: a name (`reference`), or a folder with a Dockerfile (`context`)."""

    reference: str = ""
    context: Path | None = None
    seconds: float = BUILD_SECONDS

    @property
    def tag(self) -> str:
        """The name of a built image says what it was built from."""
        assert self.context is not None
        return f"rl360-task:{blake3.blake3(digest_of_folder(self.context).encode()).hexdigest()[:32]}"


class Images:
    """Images of one daemon. `folder` keeps the build logs, and the locks by which runners of a machine build each only once."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._lock = threading.Lock()
        self._found: dict[Source, Future[str]] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="images")

    def get(self, source: Source, seconds: float) -> str:
        """The image's id. Raises InfraError; when the caller's `seconds` are over, the work goes on for whoever comes next."""
        with self._lock:
            made = self._found.get(source)
            if made is None or (made.done() and made.exception() is not None):
                made = self._found[source] = self._pool.submit(self._make, source)
        try:
            return made.result(max(0.0, seconds))
        except TimeoutError:
            what = source.reference or f"of {source.context}"
            why = f"the image {what} was not ready in the {seconds:.1f} s that were left; it is still being made. Raise budgets.setup"
            raise InfraError(Boundary.SANDBOX, Cause.TIMEOUT, why, exception="ImageTimeout") from None

    def forget(self, source: Source) -> None:
        """It is not there any more: the next `get` makes it again."""
        with self._lock:
            self._found.pop(source, None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, source: Source) -> str:
        name = source.reference or source.tag
        with self._engine.typed(f"image {name}"):
            if found := self._id(name):
                return found
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"{name.replace('/', '_').replace(':', '_')}.log").open("a+b") as out:
                fcntl.flock(out, fcntl.LOCK_EX)  # two runners of this machine: one makes it, the other finds it
                if found := self._id(name):
                    return found
                started = time.monotonic()
                self._pull(source, out) if source.reference else self._build(source, name, out)
                log.info("image %s made in %.1f s", name, time.monotonic() - started)
            found = self._id(name)
            if found is None:
                raise InfraError(Boundary.SANDBOX, Cause.LOST, f"image {name} was made and is not there")
            return found

    def _id(self, name: str) -> str | None:
        try:
            return str(self._engine.api.inspect_image(name)["Id"])
        except self._engine.errors.NotFound:
            return None

    def _pull(self, source: Source, out: IO[bytes]) -> None:
        api = self._engine.api
        name, _, tag = source.reference.partition("@") if "@" in source.reference else source.reference.rpartition(":")
        if not name or "/" in tag:  # no tag at all; a ":" belonged to a port
            name, tag = source.reference, "latest"
        self._follow(api.pull(name, tag=tag, stream=True, decode=True), source, out, "pull")

    def _build(self, source: Source, tag: str, out: IO[bytes]) -> None:
        assert source.context is not None
        with tempfile.TemporaryFile() as tar:
            pack(source.context, "/", tar)
            tar.seek(0)
            lines = self._engine.api.build(
                fileobj=tar,
                custom_context=True,
                tag=tag,
                rm=True,
                forcerm=True,
                decode=True,
                timeout=source.seconds,
                labels={"rl360.image": tag},
            )
            self._follow(lines, source, out, "build")

    def _follow(self, lines: Any, source: Source, out: IO[bytes], what: str) -> None:
        """Write the daemon's words to the log until it is done. The time limit also ends the work: the daemon sees us go."""
        end = time.monotonic() + source.seconds
        failed = ""
        try:
            for line in lines:
                failed = str(line.get("error", "")) or failed
                out.write(str(line.get("stream") or line.get("error") or f"{line.get('status', '')}\n").encode())
                if time.monotonic() > end:
                    raise self._slow(source, out, what)
        except Exception as e:
            if "Timeout" in type(e).__name__:
                raise self._slow(source, out, what) from e
            raise
        finally:
            lines.close()
            out.flush()
        if failed:
            raise InfraError(Boundary.SANDBOX, Cause.START_FAILED, f"the {what} failed: {_tail(out)}", exception="ImageFailed")

    def _slow(self, source: Source, out: IO[bytes], what: str) -> InfraError:
        out.flush()
        why = f"the {what} was not done in {source.seconds:g} s ([environment] build_timeout_sec): {_tail(out)}"
        return InfraError(Boundary.SANDBOX, Cause.TIMEOUT, why, exception="ImageTimeout")


def _tail(out: IO[bytes]) -> str:
    out.flush()
    out.seek(0, os.SEEK_END)
    out.seek(max(0, out.tell() - _LOG_TAIL))
    return out.read().decode(errors="replace").strip()
