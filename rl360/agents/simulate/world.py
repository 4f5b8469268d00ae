"""What `rl360 simulate sandboxes` assumes, and what it counts. Sizes are MB (registry) and MiB (memory), times seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, structs

from rl360.agents.placement import Need
from rl360.config import ConfigError, Positive, Seconds, Section, Waves

Amount = Annotated[float, Meta(gt=0)]


class World(Section, frozen=True, kw_only=True):
    """`images` are used by equally many starts each. A share of the images is `heavy`: their attempts build something large.

    An attempt works for 0.5 to 1.5 times `run`, and in it builds once for `build` seconds. Building, it uses the memory that
    its task declares; else a quarter of it.
    """

    starts: Positive = 8192
    nodes: Positive = 128
    images: Positive = 512
    image_mb: Amount = 2000.0
    registry_rate: Amount = 5000.0  # MB/s in all, shared equally by the pulls under way
    pull_rate: Amount = 200.0  # MB/s of one pull at most: a node's network, disk and unpacking
    pull_timeout: Seconds = 300.0  # of one pull; what it got by then is thrown away
    node_memory_mb: Positive = 192 << 10
    node_cpus: Positive = 128
    memory_mb: Positive = 2 << 10
    heavy_memory_mb: Positive = 16 << 10
    heavy: Annotated[float, Meta(ge=0, le=1)] = 0.1
    cpus: Amount = 1.0
    heavy_cpus: Amount = 4.0
    start: Seconds = 2.0  # of a sandbox whose image is there
    run: Seconds = 900.0
    build: Seconds = 120.0
    spread: Positive = 2  # nodes that an image is pinned to
    waves: Waves = Waves(size=256, interval=5.0, max_starting=1024, max_pulls=128, tries=5, retry_seconds=10.0)

    def check(self) -> World:
        """Itself. Raises ConfigError for what can't be simulated."""
        if self.images > self.starts:
            raise ConfigError(f"images: {self.images} are more than there are starts ({self.starts})")
        if self.spread > self.nodes:
            raise ConfigError(f"spread: {self.spread} is more than there are nodes ({self.nodes})")
        if 0 < self.waves.max_pulls < self.nodes:
            raise ConfigError(f"waves.max_pulls: must be 0 or at least the number of nodes ({self.nodes}): each has a share of it")
        if max(self.memory_mb, self.heavy_memory_mb) > self.node_memory_mb or max(self.cpus, self.heavy_cpus) > self.node_cpus:
            raise ConfigError("node_memory_mb, node_cpus: a node must hold one sandbox (heavy_memory_mb, heavy_cpus)")
        return self

    @property
    def total(self) -> Need:
        return Need.of(self.node_memory_mb, self.node_cpus)

    def declared(self, *, heavy: bool) -> Need:
        return Need.of(self.heavy_memory_mb, self.heavy_cpus) if heavy else Need.of(self.memory_mb, self.cpus)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How starts are admitted (in waves, or all at once) and placed (images pinned, or anywhere), and whether they reserve."""

    waves: bool
    pinned: bool
    reserved: bool

    def rules(self, world: World) -> Waves:
        """The same rules of the same functions; all at once is one wave without bounds."""
        if self.waves:
            return world.waves
        return structs.replace(world.waves, size=world.starts, interval=0.0, max_starting=world.starts, max_pulls=0)


@dataclass(kw_only=True)
class Tally:
    """What happened. `lost` are seconds of attempts that led to nothing: tries to start that failed, and work that was killed."""

    pulls: int = 0
    pulls_peak: int = 0
    pulled_mb: float = 0.0
    pull_failed: int = 0  # attempts that never got a sandbox
    killed: int = 0  # attempts that lost theirs to the kernel: their node was out of memory
    retries: int = 0
    lost: float = 0.0
    ready: int = 0
    first_ready: float = 0.0
    half_ready: float = 0.0  # when half of all starts had been ready; 0: never
    last_ready: float = 0.0
    node_memory_peak: float = 0.0  # of a node's memory, that its sandboxes used (or asked for when one was killed)

    def seen_ready(self, now: float, starts: int) -> None:
        self.ready += 1
        self.first_ready = self.first_ready or now
        if 2 * self.ready >= starts and not self.half_ready:
            self.half_ready = now
        self.last_ready = now
