"""One turn: match the history, render what is new, sample, record, answer. Nothing changes before the turn is in the journal (S5)."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from rl360.bus import tracing
from rl360.bus.client import Bus
from rl360.bus.connection import BusError
from rl360.bus.events import Boundary, Cause, RoutingDelta, TurnCompleted
from rl360.config import Config
from rl360.sessions import generate, prompts, recording, routing
from rl360.sessions.generate import EngineClient, EngineFault
from rl360.sessions.history import Append, Branch, Retry, Rollback, match
from rl360.sessions.messages import Message
from rl360.sessions.metrics import Metrics
from rl360.sessions.names import rid
from rl360.sessions.offload import BIG, BIG_REPLY, BIG_TEXT, off_loop
from rl360.sessions.prompts import Prompt
from rl360.sessions.recording import Outcome
from rl360.sessions.requests import Incoming, RequestError, read
from rl360.sessions.routing import Delta, RoutingShape
from rl360.sessions.sampled import EngineReply, Refused, Sampled, check
from rl360.sessions.seen import unread
from rl360.sessions.store import Live, Store
from rl360.sessions.templates import Template, TemplateError
from rl360.sessions.turns import Ended, Turn, turn_of


class Turns:
    """Takes turns of the sessions of one server. `shape`: the policy's experts when replay is on."""

    def __init__(
        self, bus: Bus, store: Store, engine: EngineClient, template: Template, config: Config, metrics: Metrics, shape: RoutingShape | None
    ) -> None:
        self._bus, self._store, self._engine, self._template = bus, store, engine, template
        self._config, self._metrics, self._shape = config, metrics, shape
        self._context: Final = config.sampling.context

    async def take(self, live: Live, data: bytes, request_id: str) -> tuple[Turn, Incoming]:
        """The answer to a request: a new turn, or the recorded one when it was answered before (S5).

        Raises RequestError, Ended, EngineFault.
        """
        try:
            async with asyncio.timeout(self._engine.deadline):
                await live.lock.acquire()
        except TimeoutError:
            raise _busy("another turn of this session is still in flight", Boundary.SESSION) from None
        try:
            if live.stale:
                raise _busy("the session left memory meanwhile: send the request again", Boundary.SESSION)
            return await self._take(live, data, request_id)
        finally:
            live.lock.release()

    async def _take(self, live: Live, data: bytes, request_id: str) -> tuple[Turn, Incoming]:
        body = unread(data, live.seen)
        incoming = await off_loop(lambda b: read(b, live.seen), body, size=len(body.text), limit=BIG)
        found = live.tree.by_request.get(request_id) if request_id else None
        place = Retry(found.number) if found else match(live.tree, incoming.chain, incoming.roles)
        if isinstance(place, Retry):
            self._metrics.add("repeated_answers")
            return live.tree.get(place.turn), incoming
        self._check(live, place)
        prompt = await self._render(live, incoming, place)
        outcome = await self._sample(live, prompt)
        turn = await self._record(live, incoming, prompt, outcome, request_id)
        self._count(turn, prompt, outcome, isinstance(place, Branch))
        return turn, incoming

    def _check(self, live: Live, place: Append | Rollback | Branch) -> None:
        try:
            live.check_open()
        except Ended:
            self._metrics.add("ended_refusals")
            raise
        if isinstance(place, Branch) and self._config.sessions.divergence == "reject":
            self._metrics.add("rejected_histories")
            detail = f'the conversation differs from the recorded one at message {place.new}; sessions.divergence = "reject" (S4)'
            raise RequestError(409, "history_diverged", detail, f"messages[{place.new}]")

    # ------------------------------------------------------------------------------------------------ render

    async def _render(self, live: Live, incoming: Incoming, place: Append | Rollback | Branch) -> Prompt:
        messages = incoming.messages(place.new)
        base = live.tree.total(place.parent)
        # A lower bound first, so that a hopeless prompt is not tokenized.
        self._fits(live, base + sum(self._template.tokenizer.fewest(m.content) for m in messages))
        text = sum(len(m.content) for m in messages)
        new = await off_loop(lambda m: self._ids(m, incoming, place.parent), messages, size=text, limit=BIG_TEXT)
        self._fits(live, base + len(new))
        return prompts.build(live.tree, place, new, incoming.chain[-1])

    def _fits(self, live: Live, tokens: int) -> None:
        """Raise Ended when not even one token could be sampled after `tokens`."""
        if tokens + 1 <= self._context:
            return
        live.out_of_context = f"the conversation needs {tokens} tokens or more, the context holds {self._context}"
        self._metrics.add("ended_refusals")
        live.check_open()

    def _ids(self, messages: list[Message], incoming: Incoming, parent: int) -> list[int]:
        try:
            ids = self._template.suffix(messages) if parent else self._template.render(messages, incoming.tools)
        except TemplateError as e:  # a policy's own template may allow less than OpenAI does
            raise RequestError(422, "unsupported_content", f"the policy can't be shown this conversation: {e}", "messages") from None
        return ids + self._template.generation_prompt

    # ------------------------------------------------------------------------------------------------ sample

    async def _sample(self, live: Live, prompt: Prompt) -> Outcome:
        params = generate.sampling(self._config, self._template.stop_token_ids, self._context - prompt.tokens)
        held = live.held(prompt.parent) if self._shape else None

        def body(refused: int) -> bytes:
            return generate.body(prompt.json, rid=self._rid(live, prompt, refused), params=params, routed_from=held)

        def accept(reply: EngineReply) -> tuple[Sampled, Delta | None]:
            sampled = check(reply, prompt=prompt.json, prompt_tokens=prompt.tokens, min_version=live.min_version)
            return sampled, self._delta(live, prompt, reply, len(sampled.ids))

        started = time.time()
        live.call = asyncio.create_task(self._engine.call(body, self._headers(live, prompt), accept, prompt=prompt.json))
        try:
            answer = await live.call
        except asyncio.CancelledError:
            live.check_open()  # given up because the session is being closed: say so
            raise
        except EngineFault as e:
            live.refused += e.refused
            self._metrics.add("engine_faults")
            raise
        finally:
            live.call = None
        sampled, delta = answer.value
        return Outcome(
            sampled=sampled,
            meta=answer.reply.meta_info,
            delta=delta,
            worker=answer.worker,
            retries=answer.retries,
            started=started,
            ended=time.time(),
        )

    def _rid(self, live: Live, prompt: Prompt, refused: int) -> str:
        """A reply that was refused is never asked for again under its id: an engine may answer an id from memory."""
        return rid(live.name.session, prompt.number, prompt.asked, live.refused + refused)

    def _headers(self, live: Live, prompt: Prompt) -> dict[str, str]:
        """The routing key keeps a session on the engine that holds its cache."""
        name = live.name
        return {
            "Content-Type": "application/json",
            "X-SMG-Routing-Key": name.session,
            "traceparent": tracing.traceparent(self._bus.run, name.attempt, f"turn/{prompt.number}"),
            "x-request-id": self._rid(live, prompt, 0),
        }

    def _delta(self, live: Live, prompt: Prompt, reply: EngineReply, sampled: int) -> Delta | None:
        """Expert rows of a reply. No rows: the turn stands, and the sample will end at the last covered token (CASES 25)."""
        if self._shape is None or not reply.meta_info.routed_experts:
            return None
        held = live.held(prompt.parent)
        try:
            rows = routing.decode(reply.meta_info.routed_experts, self._shape)
            return routing.place(rows, tokens=prompt.tokens + sampled, held=held, stored=self._stored(live, prompt.parent))
        except routing.RoutingError as e:
            raise Refused(str(e)) from None

    def _stored(self, live: Live, parent: int) -> routing.Stored:
        def rows(start: int, end: int) -> routing.Rows:
            path = [live.deltas[n] for n in live.tree.path(parent) if n in live.deltas]
            stitched = routing.stitch(path, self._bus.blobs.unpack)
            assert stitched is not None  # the session holds `end` rows
            return stitched[start:end]

        return rows

    # ------------------------------------------------------------------------------------------------ record

    async def _record(self, live: Live, incoming: Incoming, prompt: Prompt, outcome: Outcome, request_id: str) -> Turn:
        """Publish, then commit. When the journal's answer is lost, so is this copy of the session: the next request rebuilds it."""
        ids = outcome.sampled.ids
        reply = await off_loop(lambda x: self._template.parse_reply(x, incoming.tools), ids, size=len(ids), limit=BIG_REPLY)
        run, blobs = self._bus.run, self._bus.blobs
        event = await recording.turn_event(
            run,
            live.name,
            prompt,
            outcome,
            blobs,
            request_id=request_id or self._rid(live, prompt, 0),
            format_error=bool(reply.format_error),
        )
        if await self._publish(live, event):
            return await self._found(live, prompt)
        turn = turn_of(event, prompt.new, ids, reply)
        live.tree.commit(turn)
        if outcome.delta is not None:
            # After the turn: rows that are lost between the two are asked for again with the next turn.
            rows = await recording.rows_event(run, live.name, prompt.number, outcome.delta, blobs)
            await self._publish(live, rows)
            live.deltas[prompt.number] = rows
        return turn

    async def _publish(self, live: Live, event: TurnCompleted | RoutingDelta) -> bool:
        """Record an event; True when the journal had one of this name already."""
        try:
            receipt = await (await self._bus.submit(event))
        except BusError as e:
            self._store.forget(live)
            raise _busy(f"the turn could not be recorded: {e}", Boundary.BUS) from e
        except asyncio.CancelledError:
            self._store.forget(live)
            raise
        return receipt.duplicate

    async def _found(self, live: Live, prompt: Prompt) -> Turn:
        """A turn of this number was recorded before: by our own retry, or by another server. The journal's is the one that counts."""
        self._store.forget(live)
        turn = (await self._store.get(live.name.session)).tree.by_asked.get(prompt.asked)
        if turn is None:
            raise _busy("another server took a turn of this session meanwhile: send the request again", Boundary.SESSION)
        return turn

    def _count(self, turn: Turn, prompt: Prompt, outcome: Outcome, branched: bool) -> None:
        m = self._metrics
        m.add("turns")
        m.add("rollbacks", prompt.dropped > 0)
        m.add("branches", branched)
        m.add("format_errors", bool(turn.reply.format_error))
        m.add("truncated", turn.finish_reason == "length")
        m.add("engine_retries", outcome.retries)
        m.add("prompt_tokens", prompt.tokens)
        m.add("output_tokens", turn.output_tokens)
        m.add("cached_tokens", turn.cached_tokens)
        m.add("best_cached_tokens", prompt.best_cached)
        if self._shape is not None:
            m.add("routing_missing", outcome.delta is None)
        if outcome.delta is not None:
            m.add("routing_overlap_rows", outcome.delta.overlap_rows)
            m.add("routing_overlap_mismatch", outcome.delta.overlap_mismatch)


def _busy(detail: str, boundary: Boundary) -> EngineFault:
    return EngineFault(boundary, Cause.LOST, "Unavailable", detail, status=503)
