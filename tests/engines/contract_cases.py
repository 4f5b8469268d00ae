"""What every server of the contract does, as cases that run on any of them through the client that RL360 uses.

Servers: the tiny engine, recorded replies of SGLang 0.5.17 (H200) and 0.5.23 (CPU), and a real SGLang (tests/live/).
A case leaves the server as it found it.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from rl360.bus.events import Cause
from rl360.engines import contract as c
from rl360.engines.client import EngineClient, EngineError
from rl360.engines.dialect import Dialect

RECORDED_PROMPT: Final = [1001, 72, 101, 108, 111, 220, 500, 600, 700, 42, 17, 99]


@dataclass(frozen=True)
class Subject:
    """A server and what is known of its model. `rows`: MoE layers x top-k of a token (0: expert rows are off)."""

    client: EngineClient
    dialect: Dialect
    prompt: list[int]
    rows: int = 0
    long: int = 1200  # tokens of a reply that is under way when it is aborted


async def sample(s: Subject, tokens: int = 8, *, stop: list[int] | None = None, rid: str = "", **flags: object) -> c.GenerateReply:
    params = c.SamplingParams(temperature=0, max_new_tokens=tokens, stop_token_ids=stop or [])
    return await s.client.generate(c.GenerateRequest(input_ids=s.prompt, sampling_params=params, rid=rid, **flags))  # type: ignore[arg-type]


async def refused(call: Awaitable[object], *says: str) -> None:
    """The call is answered with an error that says why; the server goes on."""
    error: EngineError | None = None
    try:
        await call
    except EngineError as e:
        error = e
    assert error is not None and error.cause is Cause.REFUSED and error.status == 400, error
    assert all(word in error.detail for word in says), error.detail


async def s1_the_prompt_is_echoed(s: Subject) -> None:
    reply = await sample(s, return_prompt_token_ids=True)
    assert reply.prompt_token_ids == s.prompt and reply.meta_info.prompt_tokens == len(s.prompt)


async def every_token_has_a_finite_log_prob(s: Subject) -> None:
    reply = await sample(s, return_logprob=True)
    rows = reply.meta_info.output_token_logprobs
    assert reply.output_ids and [row[1] for row in rows] == reply.output_ids
    assert all(math.isfinite(row[0]) and row[0] <= 0 for row in rows)
    assert reply.meta_info.completion_tokens == len(reply.output_ids)


async def s6_the_reply_names_the_version_of_its_tokens(s: Subject) -> None:
    reply = await sample(s, return_logprob=True)
    assert reply.meta_info.weight_version == (await s.client.model_info()).weight_version
    spans = reply.meta_info.weight_versions
    assert bool(spans) == s.dialect.spans
    if spans:
        assert (spans[0].start, spans[-1].end) == (0, len(reply.output_ids))


async def a_known_prefix_is_not_computed_again(s: Subject) -> None:
    await sample(s, return_logprob=True)
    again = await sample(s, return_logprob=True)
    assert again.meta_info.cached_tokens == len(s.prompt) - 1


async def a_stop_token_is_kept_in_ids_and_log_probs(s: Subject) -> None:
    free = await sample(s, return_logprob=True)
    stop = free.output_ids[3]
    reply = await sample(s, 20, stop=[stop], return_logprob=True)
    assert reply.meta_info.finish_reason.type == "stop" and reply.meta_info.finish_reason.matched == stop
    assert reply.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]
    assert [row[1] for row in reply.meta_info.output_token_logprobs] == reply.output_ids


async def no_tokens_are_no_request(s: Subject) -> None:
    params = c.SamplingParams(temperature=0, max_new_tokens=8)
    await refused(s.client.generate(c.GenerateRequest(input_ids=[], sampling_params=params)), "empty")


async def s10_expert_rows_cover_all_tokens_but_the_last(s: Subject) -> None:
    reply = await sample(s, 5, return_routed_experts=True, return_logprob=True)
    assert _bytes(reply) == 4 * s.rows * (len(s.prompt) + len(reply.output_ids) - 1)


async def s9_expert_rows_come_from_where_they_are_asked_for(s: Subject) -> None:
    reply = await sample(s, 5, return_routed_experts=True, routed_experts_start_len=7)
    assert _bytes(reply) == 4 * s.rows * (len(s.prompt) + len(reply.output_ids) - 1 - 7)


async def s9_expert_rows_from_beyond_the_prompt_are_refused(s: Subject) -> None:
    for start in (-1, len(s.prompt) + 1):
        await refused(sample(s, 5, return_routed_experts=True, routed_experts_start_len=start), "routed_experts_start_len", str(start))


async def without_expert_capture_there_are_no_rows_and_no_error(s: Subject) -> None:
    reply = await sample(s, 2, return_routed_experts=True)
    assert reply.meta_info.routed_experts is None


async def an_aborted_request_is_answered_with_what_it_has(s: Subject) -> None:
    params = c.SamplingParams(temperature=0, max_new_tokens=s.long, ignore_eos=True)
    request = c.GenerateRequest(input_ids=s.prompt, sampling_params=params, return_logprob=True, rid="abort-me")
    victim = asyncio.ensure_future(s.client.generate(request))
    while not victim.done():
        await s.client.abort("abort-me")
        await asyncio.wait({victim}, timeout=0.05)
    reply = victim.result()
    assert reply.meta_info.finish_reason.type == "abort" and reply.meta_info.id == "abort-me"
    assert [row[1] for row in reply.meta_info.output_token_logprobs] == reply.output_ids


async def case29_a_label_is_what_the_next_reply_bears(s: Subject) -> None:
    before = (await s.client.model_info()).weight_version
    await s.client.label("7")
    assert (await sample(s, 2)).meta_info.weight_version == "7"
    await s.client.label(before)


async def every_pause_ends_with_continue(s: Subject) -> None:
    for mode in ("abort", "retract", "in_place"):
        await s.client.pause(mode)
        await s.client.resume()
    await s.client.resume()  # harmless when nothing is paused


async def a_paused_server_says_what_it_is(s: Subject) -> None:
    await s.client.pause(s.dialect.flush_pause)
    try:
        assert await s.client.dialect() == s.dialect
    finally:
        await s.client.resume()


async def a_pause_for_a_push_lets_the_cache_be_flushed(s: Subject) -> None:
    await s.client.pause(s.dialect.flush_pause)
    try:
        await s.client.flush()
    finally:
        await s.client.resume()


async def an_update_that_brought_nothing_ends(s: Subject) -> None:
    """The tiny engine refuses it: there an update is complete or none."""
    await s.client.begin_update()
    await s.client.end_update()


async def an_unknown_group_is_refused(s: Subject) -> None:
    await refused(s.client.leave_group("rl360-gloo", timeout=10), "does not exist")


async def case31_checksums_name_every_parameter_of_every_rank(s: Subject) -> None:
    sums = await s.client.checksums()
    assert len(sums) == s.dialect.tp
    assert all("model.embed_tokens.weight" in rank and "model.norm.weight" in rank for rank in sums)
    assert await s.client.checksums() == sums


Case = Callable[[Subject], Awaitable[None]]

CASES: Final[dict[str, Case]] = {
    case.__name__: case
    for case in (
        s1_the_prompt_is_echoed,
        every_token_has_a_finite_log_prob,
        s6_the_reply_names_the_version_of_its_tokens,
        a_known_prefix_is_not_computed_again,
        a_stop_token_is_kept_in_ids_and_log_probs,
        no_tokens_are_no_request,
        an_aborted_request_is_answered_with_what_it_has,
        case29_a_label_is_what_the_next_reply_bears,
        every_pause_ends_with_continue,
        a_paused_server_says_what_it_is,
        a_pause_for_a_push_lets_the_cache_be_flushed,
        an_unknown_group_is_refused,
        case31_checksums_name_every_parameter_of_every_rank,
    )
}
WITH_SESSIONS: Final[dict[str, Case]] = {case.__name__: case for case in (an_update_that_brought_nothing_ends,)}
WITH_ROWS: Final[dict[str, Case]] = {
    case.__name__: case
    for case in (
        s10_expert_rows_cover_all_tokens_but_the_last,
        s9_expert_rows_come_from_where_they_are_asked_for,
        s9_expert_rows_from_beyond_the_prompt_are_refused,
    )
}
WITHOUT_ROWS: Final[dict[str, Case]] = {case.__name__: case for case in (without_expert_capture_there_are_no_rows_and_no_error,)}


def cases_for(dialect: Dialect, *, rows: bool) -> dict[str, Case]:
    """The cases that a server must pass, by what it is and whether it captures experts."""
    return {**CASES, **(WITH_SESSIONS if dialect.sessions and not dialect.staged else {}), **(WITH_ROWS if rows else WITHOUT_ROWS)}


def _bytes(reply: c.GenerateReply) -> int:
    assert reply.meta_info.routed_experts is not None
    return len(base64.b64decode(reply.meta_info.routed_experts))
