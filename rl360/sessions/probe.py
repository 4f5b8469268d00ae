"""One call before a run starts that shows whether engines return expert rows when asked (S10, CASES 23)."""

from __future__ import annotations

import asyncio
from typing import Final

from rl360.config import Config
from rl360.sessions import generate, routing
from rl360.sessions.generate import EngineClient, EngineFault
from rl360.sessions.messages import Message
from rl360.sessions.routing import NO_ROWS, RoutingError, RoutingShape
from rl360.sessions.sampled import EngineReply
from rl360.sessions.templates import Template
from rl360.sessions.turns import fragment

_DEADLINE: Final = 300.0
_PAUSE: Final = 1.0


async def expert_rows(engine: EngineClient, template: Template, config: Config, shape: RoutingShape, stop: asyncio.Event) -> None:
    """Raise RoutingError when an engine answers without usable rows. Waits for the first engine, up to five minutes."""
    ids = template.render([Message(role="user", content="probe")]) + template.generation_prompt
    params = generate.sampling(config, template.stop_token_ids, 1)
    body = generate.body(fragment(ids), rid="probe.", params=params, routed_from=0)
    headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": "probe"}
    async with asyncio.timeout(_DEADLINE):
        while not stop.is_set():
            try:
                answer = await engine.call(lambda _: body, headers, lambda reply: reply)
            except EngineFault:
                await asyncio.sleep(_PAUSE)  # no engine yet
                continue
            check(answer.reply, len(ids), shape)
            return


def check(reply: EngineReply, prompt_tokens: int, shape: RoutingShape) -> None:
    """Raise RoutingError unless the reply has one row for each token but the last."""
    data = reply.meta_info.routed_experts
    if not data:
        raise RoutingError(NO_ROWS)
    rows = routing.decode(data, shape)
    wanted = prompt_tokens + len(reply.output_ids) - 1
    if len(rows) != wanted:
        raise RoutingError(f"the engine returned {len(rows)} expert rows where {wanted} were due")
