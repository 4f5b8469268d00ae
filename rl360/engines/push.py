"""Push a policy version to the engines: plan, gather, pause, send, verify, label, continue.

An engine that fails or goes silent is left out and the push goes on for the rest on a rebuilt plan; the version number is
spent once. Whatever happens, every engine that was paused is told to continue (CASES 34), and nothing waits for ever.
An engine that writes live weights bears the label TORN from the first byte to the agreed checksum, so no turn is made of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Protocol

import aiohttp
from torch import Tensor

from rl360.bus import events as ev
from rl360.bus.events import Boundary, Cause
from rl360.engines.client import EngineClient, EngineError
from rl360.engines.contract import TORN
from rl360.engines.dialect import Dialect
from rl360.engines.expert_group import Holders
from rl360.engines.group import WeightGroup
from rl360.engines.holdings import Holdings
from rl360.engines.plan import Bucket, EngineSpec, PushPlan, ShardSpec, plan_push, splits
from rl360.engines.push_outcome import PushOutcome
from rl360.engines.shared_memory import SharedMemory
from rl360.engines.together import Broken, Clients, Faults, on_all
from rl360.engines.weights import HeldExpert, shard_specs

_PROBE: Final = 2.0  # seconds in which a live engine answers /server_info


class Carrier(Protocol):
    """How the weights of a plan reach its engines: over its groups, or through shared memory."""

    async def send_experts(self, version: int, clients: Clients) -> None:
        """What doesn't come in buckets. Raises Broken."""
        ...

    async def send(self, bucket: Bucket, weights: Mapping[str, Tensor], clients: Clients, *, flush_cache: bool) -> None:
        """Raises Broken."""
        ...


class Pusher:
    """Pushes to whatever engines there are; keeps the group as long as the plan is the same. An async context manager."""

    def __init__(
        self,
        *,
        bucket_bytes: int,
        timeout: float,
        call_timeout: float,
        shared_memory: bool = False,
        holders: Holders | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """`timeout`: seconds of a whole push; `call_timeout`: of one call or bucket; `host`: where engines reach the trainer.

        `shared_memory`: all engines are on this host; they map the trainer's memory and there is no group.
        `holders`: the trainer's ranks, where experts are to go straight from them to the GPUs that serve them.
        """
        self.bucket_bytes, self.timeout, self.call_timeout = bucket_bytes, timeout, call_timeout
        self.probe = min(_PROBE, call_timeout)
        self.dialects: dict[str, Dialect] = {}  # by generation, which never changes its own
        self._shared_memory, self._holders, self._host = shared_memory, holders, host
        self._lock = asyncio.Lock()
        self._group: WeightGroup | None = None
        self._last_plan = ""

    async def __aenter__(self) -> Pusher:
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._group is not None:
            self._group.close()
        await self._http.close()

    async def unable(self, engines: Mapping[str, str], experts: int) -> str:
        """Why the next push to these engines can't send a layer's `experts` straight from the ranks that hold them; empty: it can."""
        if self._holders is None:
            return "the recipe asks for it"
        async with self._lock:
            await self.learn(self._clients(engines))
        return next((why for g in engines if (why := self.takes_no_experts(g, experts))), "")

    async def push(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        engines: Mapping[str, str],
        *,
        experts: Sequence[HeldExpert] = (),
        unable: str = "the trainer's rank 0 has them all",
        attempt: int = 1,
    ) -> PushOutcome:
        """Bring `engines` (generation: URL) to `version`. An engine's failure is a result, never an exception.

        `weights`: tensor by HF name, in the dtype that the engines hold; they must not change until this returns.
        `experts`: those that ranks of the trainer hold, in no bucket and not in `weights`, where `unable` is empty.
        `attempt` counts the pushes of this version over restarts of the trainer (`Membership.pushes` + 1). The KV of
        older weights is dropped: no request may be in flight (schedules `sync` and `one_step`).
        """
        async with self._lock:
            return await _Push(self, version, weights, experts, unable, self._clients(engines)).run(attempt)

    def _clients(self, engines: Mapping[str, str]) -> dict[str, EngineClient]:
        return {g: EngineClient(self._http, url, g, timeout=self.call_timeout) for g, url in engines.items()}

    async def learn(self, clients: Clients) -> Faults:
        """How to drive these engines; who can't be driven in this push, and why."""
        found, faults = await on_all({g: c for g, c in clients.items() if g not in self.dialects}, lambda c: c.dialect())
        self.dialects |= found
        spoken = [self.dialects[g] for g in clients if g in self.dialects]
        for generation, client in clients.items():
            dialect = self.dialects.get(generation)
            if dialect is not None and (why := self._unfit(dialect, spoken[0])):
                faults[generation] = client.refused(why)
        return faults

    def takes_no_experts(self, generation: str, experts: int) -> str:
        """Why this engine can't take them from several ranks; empty: it can, or it isn't known yet."""
        dialect = self.dialects.get(generation)
        if dialect is None:
            return ""
        if not dialect.experts_from_ranks:
            return f"{dialect.server} takes no weights from several ranks of the trainer"
        return splits(EngineSpec(generation=generation, gpus=dialect.tp, ep=dialect.ep), experts)

    def _unfit(self, dialect: Dialect, first: Dialect) -> str:
        if self._shared_memory and not dialect.shared_memory:
            return f"{dialect.server} can't map the trainer's memory: set push.path = \"broadcast\""
        if dialect.backend != first.backend:
            return f"{dialect.server} receives over {dialect.backend}, {first.server} over {first.backend}: one push has one group"
        return ""

    def plan(self, shards: list[ShardSpec], generations: Iterable[str], *, unable: str) -> tuple[PushPlan, bool]:
        """The plan for these engines, and whether it is another one than last time."""
        engines = [EngineSpec(generation=g, gpus=self.dialects[g].tp, ep=self.dialects[g].ep) for g in generations]
        plan = plan_push(shards, engines, self.bucket_bytes, place_experts=not unable, unable=unable, shared_memory=self._shared_memory)
        new, self._last_plan = plan.digest != self._last_plan, plan.digest
        return plan, new

    async def carrier(self, plan: PushPlan, clients: Clients) -> Carrier:
        """What carries this plan: the group at hand, a new one, or shared memory. Raises Broken."""
        if plan.path == "shared_memory":
            return SharedMemory(self.dialects)
        old = self._group
        if old is not None and not old.closed and old.plan.digest == plan.digest:
            return old
        if old is not None:
            self._group = None
            await old.dissolve(clients, timeout=self.probe)
        backend = self.dialects[plan.generations[0]].backend
        self._group = await WeightGroup.form(plan, clients, self._holders, host=self._host, backend=backend, timeout=self.call_timeout)
        return self._group


class _Push:
    """One push under way. `_left`: the engines that are still in it."""

    def __init__(
        self,
        pusher: Pusher,
        version: int,
        weights: Mapping[str, Tensor],
        experts: Sequence[HeldExpert],
        unable: str,
        clients: Mapping[str, EngineClient],
    ) -> None:
        self._pusher, self._version, self._weights = pusher, version, weights
        self._clients, self._left = clients, dict(clients)
        self._experts = 1 + max((e.shard.expert for e in experts if e.shard.expert is not None), default=-1)
        self._unable = unable
        self._shards = [*shard_specs(weights), *(e.shard for e in experts)]
        self._built: list[PushPlan] = []
        self._holdings = Holdings(weights, {e.shard.name: e.checksum for e in experts})
        self._results: dict[str, ev.PushResult] = {}
        self._told: dict[str, float] = {}  # when each engine was told to pause; it may have, even if its answer was lost
        self._paused: set[str] = set()
        self._resumed: dict[str, float] = {}
        self._calls = self._bucket_bytes = 0  # that went to each GPU in this round
        self._experts_sent = False

    async def run(self, attempt: int) -> PushOutcome:
        started = time.perf_counter()
        self._leave_out(await self._pusher.learn(self._left))
        if self._experts:  # who was silent when the trainer asked, and isn't now
            faults = {g: self._pusher.takes_no_experts(g, self._experts) for g in self._left}
            self._leave_out({g: self._clients[g].refused(why) for g, why in faults.items() if why})
        await self._holdings.prepare(self._pusher.dialects[g] for g in self._left)
        try:
            async with asyncio.timeout(self._pusher.timeout):
                await self._rounds()
        except TimeoutError:
            self._leave_out({g: self._error(g, f"the push took longer than {self._pusher.timeout:g} s") for g in self._left})
        finally:
            await self._resume()
        return PushOutcome(
            version=self._version,
            attempt=attempt,
            plan=self._plan,
            built=tuple(self._built),
            checksum=self._holdings.digest,
            results=tuple(self._results[g] for g in sorted(self._results)),
            pause_seconds=max((self._resumed[g] - self._told[g] for g, r in self._results.items() if r.ok), default=0.0),
            seconds=time.perf_counter() - started,
        )

    async def _rounds(self) -> None:
        """Try until the engines that are left have everything. Each set of engines is tried twice at most, so this ends."""
        tried: set[str] = set()
        while True:
            self._plan, new = self._pusher.plan(self._shards, self._left, unable=self._unable)
            self._built += [self._plan] if new else []
            if not self._left:
                return
            try:
                await self._transfer()
            except Broken as broken:
                self._leave_out(await self._culprits(broken, last_try=self._plan.digest in tried))
                tried.add(self._plan.digest)
                continue
            return await self._complete()

    async def _transfer(self) -> None:
        """All weights to all engines that are left. Raises Broken."""
        carrier = await self._pusher.carrier(self._plan, self._left)
        await self._each(self._pause)
        await self._each(self._begin)
        self._calls, self._bucket_bytes, self._experts_sent = 0, 0, False
        if self._plan.sends:
            await carrier.send_experts(self._version, self._left)
            self._calls, self._experts_sent = 1, True
        for bucket in self._plan.buckets:
            await carrier.send(bucket, self._weights, self._left, flush_cache=bucket is self._plan.buckets[-1])
            self._calls, self._bucket_bytes = self._calls + 1, self._bucket_bytes + bucket.bytes

    async def _each(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        _, faults = await on_all(self._left, call)
        if faults:
            raise Broken(faults)

    async def _pause(self, client: EngineClient) -> None:
        if client.generation not in self._paused:
            self._told.setdefault(client.generation, time.perf_counter())
            await client.pause(self._dialect(client).flush_pause)
            self._paused.add(client.generation)

    async def _begin(self, client: EngineClient) -> None:
        dialect = self._dialect(client)
        if not dialect.staged:
            await client.label(TORN)
        if not dialect.sessions:
            return
        try:
            await client.begin_update()
        except EngineError as e:
            if e.cause is not Cause.REFUSED:
                raise
            await client.end_update()  # a failed round, or a trainer that died, left an update open
            await client.begin_update()

    async def _culprits(self, broken: Broken, *, last_try: bool) -> Faults:
        """Who is to blame: those that don't answer a probe, for a dead peer makes its neighbours fail too.

        When all answer it may have been a lost connection: nobody is blamed before the second time.
        """
        _, silent = await on_all(self._left, lambda c: c.server_info(timeout=self._pusher.probe))
        if silent:
            return {g: broken.faults.get(g, error) for g, error in silent.items()}
        if not last_try:
            return {}
        return broken.faults or {g: self._error(g, str(broken)) for g in self._left}

    async def _complete(self) -> None:
        """Verify and label every engine by itself."""
        _, faults = await on_all(self._left, self._verify)
        self._leave_out(faults)
        for g in self._left:
            self._results[g] = self._result(g, ok=True, checksum=self._holdings.digest)

    async def _verify(self, client: EngineClient) -> None:
        """An engine says 200 to names that it doesn't have, so its own checksums decide (CASES 31)."""
        dialect = self._dialect(client)
        if dialect.sessions:
            await client.end_update()
        if names := self._holdings.disagreement(await client.checksums(), dialect):
            raise self._error(client.generation, f"holds other weights than the trainer: {names}")
        await client.label(str(self._version))

    def _dialect(self, client: EngineClient) -> Dialect:
        return self._pusher.dialects[client.generation]

    async def _resume(self) -> None:
        """Continue every engine that was told to pause, the failed ones too. One that can't is not ok."""

        async def resume(client: EngineClient) -> None:
            await client.resume(timeout=None if client.generation in self._left else self._pusher.probe)
            self._resumed[client.generation] = time.perf_counter()

        _, faults = await on_all({g: self._clients[g] for g in self._told}, resume)
        self._leave_out({g: error for g, error in faults.items() if g in self._left})

    def _leave_out(self, faults: Faults) -> None:
        for g, error in faults.items():
            self._left.pop(g, None)
            self._results[g] = self._result(g, ok=False, error=str(error))

    def _result(self, generation: str, *, ok: bool, checksum: str = "", error: str = "") -> ev.PushResult:
        """With what came to the engine in the last round, over all its GPUs."""
        gpus = self._pusher.dialects[generation].tp if generation in self._pusher.dialects else 1
        experts = sum(s.bytes for s in self._plan.sends if s.generation == generation) if self._experts_sent else 0
        size = self._bucket_bytes * gpus + experts
        return ev.PushResult(generation=generation, ok=ok, checksum=checksum, error=error, calls=self._calls, bytes=size)

    def _error(self, generation: str, detail: str) -> EngineError:
        return EngineError(Boundary.ENGINE, Cause.UNKNOWN, detail, generation=generation)
