"""S1, S6, S8: the tokens of every sample are those of its turns; every blob is what its digest says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl360.audit.finding import Finding
from rl360.bus import events as ev
from rl360.bus import sample as wire
from rl360.bus.blobs import BlobError, BlobMissing, BlobStore
from rl360.bus.codec import Recorded
from rl360.bus.payload import Payload
from rl360.journal.pruned import Pruned


class BlobCheck:
    """Reads every payload that an event carries or names."""

    def __init__(self, blobs: BlobStore, pruned: Pruned) -> None:
        self._blobs, self._pruned = blobs, pruned
        self._read: set[str] = set()

    def on(self, recorded: Recorded) -> Iterator[Finding]:
        event = recorded.event
        for name in event.__struct_fields__:
            payload = getattr(event, name)
            if not isinstance(payload, Payload) or payload.digest in self._read:
                continue
            try:
                self._blobs.unpack(payload)
            except BlobError as e:
                if isinstance(e, BlobMissing) and self._pruned.covers(event.step):
                    continue
                about = str(getattr(event, "session", event.run))
                yield Finding(rule="blob", about=about, text=f"{type(event).__name__}.{name}: {e}", seq=recorded.seq)
            else:
                self._read |= {payload.digest} - {""}

    def end(self) -> Iterable[Finding]:
        return ()


@dataclass(frozen=True)
class _Conversation:
    """All tokens of a chain of turns, and for each the turn that sampled it (0: appended by others) and its place in that turn."""

    ids: NDArray[np.int32]
    turn: NDArray[np.int32]
    place: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


class TokenCheck:
    """Merges again, in its own way, and compares."""

    def __init__(self, blobs: BlobStore, pruned: Pruned) -> None:
        self._blobs, self._pruned = blobs, pruned
        self._turns: dict[str, dict[int, ev.TurnCompleted]] = {}  # by session
        self._seen: dict[str, set[int]] = {}  # session -> branches
        self._sampled: dict[str, set[tuple[int, int]]] = {}  # session -> sampled tokens (turn, place) that its branches hold
        self._covered: dict[str, set[tuple[int, int]]] = {}  # session -> those that some branch trains on
        self._gone: set[str] = set()  # sessions of which a blob is missing

    def on(self, recorded: Recorded) -> Iterator[Finding]:
        event = recorded.event
        if isinstance(event, ev.TurnCompleted):
            self._turns.setdefault(event.session, {}).setdefault(event.turn, event)
        elif isinstance(event, ev.TrajectoryMerged) and event.branch not in self._seen.setdefault(event.session, set()):
            self._seen[event.session].add(event.branch)
            try:
                problems = list(self._compare(event))
            except BlobMissing as e:
                self._gone.add(event.session)
                problems = [] if self._pruned.covers(event.step) else [("S8", str(e))]
            except (BlobError, wire.SampleError) as e:
                problems = [("S8", str(e))]
            if len(self._seen[event.session]) == event.branches:
                problems += self._left_out(event.session)
            for rule, text in problems:
                yield Finding(rule=rule, about=f"{event.session} branch {event.branch}", text=text, seq=recorded.seq)

    def end(self) -> Iterable[Finding]:
        return ()

    def _compare(self, merged: ev.TrajectoryMerged) -> Iterator[tuple[str, str]]:
        sample = wire.decode(self._blobs.unpack(merged.sample))
        told = self._conversation(chain_of(self._turns.get(merged.session, {}), merged.branch))
        n = len(told.ids) - merged.cut_tokens
        if (sample.attempt, sample.branch) != (merged.attempt, merged.branch):
            yield "S6", f"holds the sample of {sample.attempt} branch {sample.branch}"
        if not n == len(sample) == merged.tokens:
            yield "S8", f"has {len(sample)} tokens and says {merged.tokens}; its turns have {n}"
            return
        if not np.array_equal(sample.ids, told.ids[:n]):
            first = int(np.argmax(sample.ids != told.ids[:n]))
            yield "S1", f"token {first} is {sample.ids[first]}; its turn says {told.ids[first]}"
        mask = sample.mask != 0
        if int(mask.sum()) != merged.sampled:
            yield "S6", f"{int(mask.sum())} tokens are marked as sampled, {merged.sampled} are said to be"
        if (told.turn[:n][mask] == 0).any():
            yield "S6", "a token that the policy did not sample is marked as sampled"
            return
        yield from self._votes(merged, told, mask)
        if not np.array_equal(sample.logprobs[mask], told.logprobs[:n][mask]) or not np.array_equal(
            sample.versions[mask], told.versions[:n][mask]
        ):
            yield "S6", "log-probs or versions are not those of its turns"

    def _votes(self, merged: ev.TrajectoryMerged, told: _Conversation, mask: NDArray[np.bool_]) -> Iterator[tuple[str, str]]:
        """Each sampled token trains in exactly one branch (S4)."""
        n = len(mask)
        covered = self._covered.setdefault(merged.session, set())
        own = set(zip(told.turn[:n][mask].tolist(), told.place[:n][mask].tolist(), strict=True))
        if own & covered:
            yield "S6", f"{len(own & covered)} sampled tokens train in another branch as well"
        covered |= own
        held = told.turn[:n] != 0
        self._sampled.setdefault(merged.session, set()).update(
            zip(told.turn[:n][held].tolist(), told.place[:n][held].tolist(), strict=True)
        )

    def _left_out(self, session: str) -> Iterator[tuple[str, str]]:
        """All branches are there: what none of them trains on is lost. The session's turns are no longer needed."""
        self._turns.pop(session, None)
        missing = self._sampled.pop(session, set()) - self._covered.pop(session, set())
        if missing and session not in self._gone:
            yield "S6", f"{len(missing)} sampled tokens train in no branch"

    def _conversation(self, chain: Sequence[ev.TurnCompleted]) -> _Conversation:
        parts: list[_Conversation] = [_nothing(np.empty(0, np.int32))]
        for turn in chain:
            parts.append(_nothing(np.frombuffer(self._blobs.unpack(turn.prompt_ids), "<i4")))
            output = np.frombuffer(self._blobs.unpack(turn.output_ids), "<i4")
            versions = _versions(turn, len(output))
            logprobs = np.frombuffer(self._blobs.unpack(turn.logprobs), "<f4")
            if len(logprobs) != len(output) or not np.isfinite(logprobs).all():
                raise wire.SampleError(f"turn {turn.turn}: {np.isfinite(logprobs).sum()} log-probs for {len(output)} tokens")
            parts.append(
                _Conversation(output, np.full(len(output), turn.turn, np.int32), np.arange(len(output), dtype=np.int32), logprobs, versions)
            )
        return _Conversation(
            ids=np.concatenate([p.ids for p in parts]),
            turn=np.concatenate([p.turn for p in parts]),
            place=np.concatenate([p.place for p in parts]),
            logprobs=np.concatenate([p.logprobs for p in parts]),
            versions=np.concatenate([p.versions for p in parts]),
        )


def _nothing(ids: NDArray[np.int32]) -> _Conversation:
    zeros = np.zeros(len(ids), np.int32)
    return _Conversation(ids, zeros, zeros, np.zeros(len(ids), np.float32), zeros - 1)


def _versions(turn: ev.TurnCompleted, tokens: int) -> NDArray[np.int32]:
    """The one version of each sampled token. Raises SampleError when a token has none, or two."""
    versions = np.full(tokens, -1, np.int32)
    end = 0
    for span in turn.spans:
        if span.start != end or span.end < span.start:
            raise wire.SampleError(f"turn {turn.turn}: its version spans leave tokens out, or name them twice: {turn.spans}")
        versions[span.start : span.end] = span.version
        end = span.end
    if end != tokens:
        raise wire.SampleError(f"turn {turn.turn}: its version spans end at token {end} of {tokens}")
    return versions


def chain_of(turns: dict[int, ev.TurnCompleted], branch: int) -> list[ev.TurnCompleted]:
    """Turns of a branch from the first to its newest, without what was rolled back and what came after a cut-off turn (S7)."""
    end = min((t.turn for t in turns.values() if t.finish_reason == "length"), default=max(turns, default=0))
    rolled_back = {t.rolled_back for t in turns.values() if t.turn <= end}
    number = max((t.turn for t in turns.values() if t.branch == branch and t.turn <= end and t.turn not in rolled_back), default=0)
    chain: list[ev.TurnCompleted] = []
    while number:
        if number not in turns:
            raise wire.SampleError(f"turn {number} is not in the journal")
        chain.append(turns[number])
        number = turns[number].parent
    return chain[::-1]
