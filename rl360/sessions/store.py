"""Sessions in memory, with the journal behind them: opened, found or rebuilt, closed.

An id that isn't in memory is rebuilt from its events, or is unknown; a fresh session never gets an old id (CASES 18).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from rl360.bus.client import Bus
from rl360.bus.events import Event, RoutingDelta, SessionClosed, SessionOpened, TurnCompleted
from rl360.bus.payload import Payload
from rl360.sessions.metrics import Metrics
from rl360.sessions.names import SessionName, parse_session
from rl360.sessions.requests import RequestError
from rl360.sessions.seen import Seen
from rl360.sessions.templates import Template
from rl360.sessions.turns import Ended, Tree, turn_of

_TYPES: Final[tuple[type[Event], ...]] = (SessionOpened, TurnCompleted, RoutingDelta, SessionClosed)
_IDLE: Final = 900.0  # seconds after which an untouched session leaves memory; the journal still has it
_CLOSED_KEPT: Final = 4096


class NotFound(Exception):
    """No such session: nobody opened it in this run."""


class Live:
    """One session in memory. `lock` is held for the whole of a turn (S5)."""

    def __init__(self, name: SessionName, min_version: int) -> None:
        self.name: Final = name
        self.min_version: Final = min_version
        self.tree: Final = Tree()
        self.seen: Final = Seen()
        self.deltas: Final[dict[int, RoutingDelta]] = {}
        self.lock: Final = asyncio.Lock()
        self.call: asyncio.Task[object] | None = None  # the model call in flight
        self.refused = 0  # replies of engines that were refused
        self.closing = False
        self.closed: SessionClosed | None = None
        self.out_of_context = ""  # why, once a prompt no longer fitted
        self.stale = False  # left memory: what it holds may lack what the journal has
        self.used = 0.0

    def held(self, turn: int) -> int:
        """Expert rows held of the conversation up to `turn`."""
        while turn:
            delta = self.deltas.get(turn)
            if delta is not None:
                return delta.first + delta.rows
            turn = self.tree.get(turn).parent
        return 0

    def check_open(self) -> None:
        """Raise Ended when no further turn can be taken (S7)."""
        if self.closing or self.closed is not None:
            raise Ended("closed", self.closed.reason if self.closed else "it is being closed")
        cut = self.tree.truncated
        if cut is not None:
            raise Ended("length", f"turn {cut.number} was cut off after {cut.output_tokens} tokens; what follows it can't train")
        if self.out_of_context:
            raise Ended("context", self.out_of_context)


class Store:
    """Sessions of one server. `seconds`: how long a close waits for a turn that is being recorded."""

    def __init__(self, bus: Bus, template: Template, sampling: dict[str, float | int], metrics: Metrics, *, seconds: float) -> None:
        self._bus, self._template, self._sampling, self._metrics, self._seconds = bus, template, sampling, metrics, seconds
        self._live: dict[str, Live] = {}
        self._closed: dict[str, SessionClosed] = {}
        self._known: set[str] = set()
        self._loading: dict[str, asyncio.Task[Live | None]] = {}

    def __len__(self) -> int:
        return len(self._live)

    async def start(self) -> None:
        """Learn which ids were opened before this server started."""
        async for recorded in self._bus.replay(types=[SessionOpened]):
            if isinstance(recorded.event, SessionOpened):
                self._known.add(recorded.event.session)

    async def open(self, name: SessionName, min_version: int) -> Live:
        """Open a session; the same request again finds it open. Raises RequestError (409) when it was closed."""
        live = await self._find(name) if name.session in self._known or name.session in self._live else None
        if live is None:
            live = await self._create(name, min_version)
        closed = self._closed.get(name.session) or live.closed
        if closed is not None:
            raise RequestError(409, "session_closed", f"session {name.session} was closed ({closed.reason}): open one with a new id")
        return live

    async def get(self, session: str) -> Live:
        """A session by id, from memory or from the journal. Raises NotFound, and Ended when it was closed."""
        if session in self._closed:
            raise Ended("closed", self._closed[session].reason)
        name = parse_session(session)
        live = await self._find(name) if name else None
        if live is None:
            raise NotFound(f"no session {session!r} in this run")
        return live

    async def close(self, session: str, reason: str) -> SessionClosed:
        """Close a session for good; a second close changes nothing. A model call in flight is given up. Raises NotFound."""
        if session in self._closed:
            return self._closed[session]
        live = await self.get(session)
        live.closing = True
        if live.call is not None:
            live.call.cancel()
        async with asyncio.timeout(self._seconds), live.lock:
            if live.closed is None:
                live.closed = await self._publish_closed(live, reason)
        self.forget(live)
        self._remember(live.closed)
        return live.closed

    def forget(self, live: Live) -> None:
        """Drop a session from memory; the next request rebuilds it."""
        live.stale = True
        if self._live.get(live.name.session) is live:
            del self._live[live.name.session]

    def _remember(self, closed: SessionClosed) -> None:
        self._closed[closed.session] = closed
        if len(self._closed) > _CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]

    def sweep(self, now: float) -> None:
        """Drop sessions that nobody touched for long (their runner died)."""
        for live in [x for x in self._live.values() if now - x.used > _IDLE and not x.lock.locked()]:
            self.forget(live)

    async def _find(self, name: SessionName) -> Live | None:
        live = self._live.get(name.session) or await self._load(name)
        if live is not None:
            live.used = asyncio.get_running_loop().time()
        return live

    async def _create(self, name: SessionName, min_version: int) -> Live:
        event = SessionOpened(
            run=self._bus.run,
            step=name.step,
            attempt=name.attempt,
            group=name.group,
            session=name.session,
            template=self._template.name,
            sampling=self._sampling,
            min_version=min_version,
        )
        ack = await (await self._bus.submit(event))
        if ack.duplicate and (live := await self._find(name)) is not None:
            return live  # opened already: by this server's last life, or through another one
        live = self._live.setdefault(name.session, Live(name, min_version))
        live.used = asyncio.get_running_loop().time()
        return live

    async def _publish_closed(self, live: Live, reason: str) -> SessionClosed:
        name = live.name
        event = SessionClosed(
            run=self._bus.run,
            step=name.step,
            attempt=name.attempt,
            group=name.group,
            session=name.session,
            reason=reason,
            turns=len(live.tree.turns),
            branches=live.tree.branches,
        )
        await self._bus.publish(event)
        return event

    async def _load(self, name: SessionName) -> Live | None:
        """Rebuild once, however many requests wait for it."""
        task = self._loading.get(name.session)
        if task is None:
            task = self._loading[name.session] = asyncio.create_task(self._rebuild(name))
            task.add_done_callback(lambda _: self._loading.pop(name.session, None))
        return await asyncio.shield(task)

    async def _rebuild(self, name: SessionName) -> Live | None:
        live: Live | None = None
        async for recorded in self._bus.replay(types=_TYPES, step=name.step, group=name.group):
            event = recorded.event
            if isinstance(event, SessionOpened) and event.session == name.session:
                live = live or Live(name, event.min_version)
            elif live is not None and isinstance(event, TurnCompleted | RoutingDelta | SessionClosed) and event.session == name.session:
                fold(live, event, self._template, self._bus.blobs.unpack)
        if live is None:
            return None
        if live.closed is not None:
            self._remember(live.closed)
        else:
            self._live[name.session] = live
            self._metrics.add("rebuilt")
        return live


def fold(
    live: Live,
    event: TurnCompleted | RoutingDelta | SessionClosed,
    template: Template,
    unpack: Callable[[Payload], bytes],
) -> None:
    """One event of a session's own journal. An event that was recorded twice counts once."""
    if isinstance(event, SessionClosed):
        live.closed = live.closed or event
    elif isinstance(event, RoutingDelta):
        live.deltas.setdefault(event.turn, event)
    elif event.turn == len(live.tree.turns) + 1:
        prompt, output = _ids(unpack(event.prompt_ids)), _ids(unpack(event.output_ids))
        # The reply as the agent got it: the verdict on its format was given with the tools at hand, so it is the event's.
        reply = template.parse_reply(output, () if event.format_error else None)
        live.tree.commit(turn_of(event, prompt, output, reply))


def _ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()
