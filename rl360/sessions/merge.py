"""A session's turns as training samples: one a branch (S6 to S8). Pure: it is handed the bytes that the events name.

    turn 1 ─ turn 2 ─ turn 3        branch 0: prompts and tool output mask 0, what was sampled mask 1
                  └── turn 4        branch 1: turns 1 and 2 again with mask 0, since branch 0 trains them; turn 4 mask 1

A sampled token is trained once, by the first branch that holds it, or not at all: when its turn was rolled back or came after a
truncated one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl360.bus.events import RoutingDelta, TurnCompleted
from rl360.bus.payload import Payload
from rl360.bus.sample import Routing, Sample, make
from rl360.sessions import routing

Unpack = Callable[[Payload], bytes]

_MASKED_VERSION: Final = -1


class MergeError(Exception):
    """Turns that don't fit together: the journal holds something that no session server would write."""


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """One sample and what is worth knowing of it. Counts are of the turns that this sample trains, so samples of one session add up.

    `cached_tokens` counts what engines held of `best_cached`, not what they shared between sessions beyond it.
    What no sample trains stands on the first one: `dropped_turns` of the session, and the format errors of turns rolled back.
    """

    sample: Sample
    routing: Routing | None
    sampled: int
    turns: int
    dropped_turns: int
    format_errors: int
    min_version: int
    max_version: int
    cached_tokens: int
    best_cached: int
    prompt_tokens: int
    cut_tokens: int


class Arrays(msgspec.Struct, frozen=True, kw_only=True):
    """Per-token arrays of one length (S8), and expert rows: one a token but the last (None: replay is off)."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    rows: routing.Rows | None

    def __len__(self) -> int:
        return len(self.ids)


def trim(arrays: Arrays, length: int) -> Arrays:
    """Cut all arrays to `length` tokens, expert rows to length - 1 (S8). Raises MergeError when they don't reach that far."""
    rows = None if arrays.rows is None else arrays.rows[: max(length - 1, 0)]
    cut = Arrays(
        ids=arrays.ids[:length], mask=arrays.mask[:length], logprobs=arrays.logprobs[:length], versions=arrays.versions[:length], rows=rows
    )
    lengths = {len(cut.ids), len(cut.mask), len(cut.logprobs), len(cut.versions)}
    if lengths != {length} or (rows is not None and len(rows) != max(length - 1, 0)):
        raise MergeError(f"arrays of {sorted(lengths)} tokens and {None if rows is None else len(rows)} rows can't be cut to {length}")
    return cut


def merge_session(turns: Sequence[TurnCompleted], deltas: Iterable[RoutingDelta], unpack: Unpack, *, replay: bool) -> list[Merged]:
    """Samples of a session, by branch. No turn: no sample. `replay`: samples carry expert rows and end where those do (CASES 25)."""
    kept = before_truncation(turns)
    by_number = {t.turn: t for t in kept}
    rows_of = {d.turn: d for d in deltas}
    claimed: set[int] = set()
    samples: list[Merged] = []
    for branch, leaf in sorted(leaves(kept).items()):
        path = _path(by_number, leaf)
        trained = {t.turn for t in path} - claimed
        claimed |= trained
        arrays = _arrays(path, trained, unpack)
        if replay:
            arrays = _with_rows(arrays, [rows_of[t.turn] for t in path if t.turn in rows_of], unpack)
        samples.append(_merged(path, trained, branch, arrays, whole=path[-1]))
    if samples:
        errors = samples[0].format_errors + sum(t.format_error for t in kept if t.turn not in claimed)
        samples[0] = msgspec.structs.replace(samples[0], dropped_turns=len({t.turn for t in turns}) - len(claimed), format_errors=errors)
    return samples


def before_truncation(turns: Sequence[TurnCompleted]) -> list[TurnCompleted]:
    """Turns up to and including the first truncated one (S7), in order; each once."""
    kept: list[TurnCompleted] = []
    for turn in sorted({t.turn: t for t in turns}.values(), key=lambda t: t.turn):
        kept.append(turn)
        if turn.finish_reason == "length":
            break
    return kept


def leaves(turns: Sequence[TurnCompleted]) -> Mapping[int, int]:
    """The last turn of each branch that was not rolled back."""
    dropped = {t.rolled_back for t in turns}
    return {t.branch: t.turn for t in turns if t.turn not in dropped}


def _path(turns: Mapping[int, TurnCompleted], leaf: int) -> list[TurnCompleted]:
    path: list[TurnCompleted] = []
    number = leaf
    while number:
        if number not in turns:
            raise MergeError(f"turn {number}, which turn {path[-1].turn} continues, is missing")
        path.append(turns[number])
        number = turns[number].parent
    return path[::-1]


def _arrays(path: Sequence[TurnCompleted], trained: set[int], unpack: Unpack) -> Arrays:
    ids: list[NDArray[np.int32]] = []
    mask: list[NDArray[np.uint8]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[NDArray[np.int32]] = []
    total = 0
    for turn in path:
        prompt, output = np.frombuffer(unpack(turn.prompt_ids), "<i4"), np.frombuffer(unpack(turn.output_ids), "<i4")
        if turn.base != total:
            raise MergeError(f"turn {turn.turn} says that it continues {turn.base} tokens, its ancestors have {total}")
        own = turn.turn in trained
        n = len(prompt)
        ids += [prompt, output]
        mask += [np.zeros(n, np.uint8), np.full(len(output), own, np.uint8)]
        logprobs += [np.zeros(n, np.float32), _logprobs(turn, unpack, len(output), own)]
        versions += [np.full(n, _MASKED_VERSION, np.int32), _versions(turn, len(output), own)]
        total += n + len(output)
    return Arrays(
        ids=np.concatenate(ids), mask=np.concatenate(mask), logprobs=np.concatenate(logprobs), versions=np.concatenate(versions), rows=None
    )


def _logprobs(turn: TurnCompleted, unpack: Unpack, tokens: int, own: bool) -> NDArray[np.float32]:
    if not own:
        return np.zeros(tokens, np.float32)
    values = np.frombuffer(unpack(turn.logprobs), "<f4")
    if len(values) != tokens:
        raise MergeError(f"turn {turn.turn} has {tokens} sampled tokens and {len(values)} log-probs")
    return values


def _versions(turn: TurnCompleted, tokens: int, own: bool) -> NDArray[np.int32]:
    """The policy version of each sampled token, from the engine's spans."""
    values = np.full(tokens, _MASKED_VERSION, np.int32)
    if own:
        for span in turn.spans:
            values[span.start : span.end] = span.version
        if (values == _MASKED_VERSION).any():
            raise MergeError(f"turn {turn.turn}: its version spans don't cover its {tokens} sampled tokens")
    return values


def _with_rows(arrays: Arrays, path: Sequence[RoutingDelta], unpack: Unpack) -> Arrays:
    """Join expert rows and cut the sample at the last token that they cover; that one needs no row of its own."""
    rows = routing.stitch(path, unpack)
    covered = 0 if rows is None else len(rows)
    joined = Arrays(ids=arrays.ids, mask=arrays.mask, logprobs=arrays.logprobs, versions=arrays.versions, rows=rows)
    return trim(joined, min(len(arrays), covered + 1))


def _merged(path: Sequence[TurnCompleted], trained: set[int], branch: int, arrays: Arrays, whole: TurnCompleted) -> Merged:
    arrays = trim(arrays, len(arrays))
    own = [t for t in path if t.turn in trained]
    versions = arrays.versions[arrays.mask == 1]
    return Merged(
        sample=make(
            attempt=whole.attempt, branch=branch, ids=arrays.ids, mask=arrays.mask, logprobs=arrays.logprobs, versions=arrays.versions
        ),
        routing=None if arrays.rows is None else routing.pack_rows(arrays.rows),
        sampled=len(versions),
        turns=len(own),
        dropped_turns=0,
        format_errors=sum(t.format_error for t in own),
        min_version=int(versions.min()) if len(versions) else _MASKED_VERSION,
        max_version=int(versions.max()) if len(versions) else _MASKED_VERSION,
        cached_tokens=sum(min(t.cached_tokens, t.best_cached) for t in own),
        best_cached=sum(t.best_cached for t in own),
        prompt_tokens=sum(t.prompt_tokens for t in own),
        cut_tokens=whole.prompt_tokens + whole.output_ids.size // 4 - len(arrays),
    )
