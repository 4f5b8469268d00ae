"""S20, S21, S24: each step trained once, on exactly the surviving samples, with the right divisor and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rl360.audit.finding import Finding
from rl360.bus import events as ev
from rl360.bus import sample as wire
from rl360.bus.blobs import BlobError, BlobStore, digest_of
from rl360.bus.codec import Recorded
from rl360.config import Config, ConfigError, parse
from rl360.trainer.groups import Survivor, survivors
from rl360.trainer.outcomes import Outcomes
from rl360.trainer.reduction import ReductionError, token_weights


class TrainingCheck:
    def __init__(self, blobs: BlobStore, steps: frozenset[int] | None) -> None:
        self._blobs, self._steps = blobs, steps
        self._config = Config()
        self._outcomes = Outcomes()
        self._groups: dict[int, int] = {}  # step -> groups it opened with
        self._decided: dict[int, dict[int, ev.GroupDecided]] = {}
        self._trained: dict[int, int] = {}  # step -> version after it
        self._version = 0
        self._made: set[int] = {0}  # versions that exist
        self._pushed = -1
        self._used: dict[str, int] = {}  # digest of a sample -> step that trained on it

    def on(self, recorded: Recorded) -> Iterator[Finding]:
        event, seq = recorded.event, recorded.seq
        self._outcomes.on(recorded)
        match event:
            case ev.RunStarted():
                self._started(event)
            case ev.StepOpened(purpose=ev.Purpose.TRAIN):
                self._groups.setdefault(event.step, len(event.groups))
                if event.step == 0 and not self._trained:
                    self._version = event.version
                    self._made.add(event.version)
            case ev.GroupDecided(purpose=ev.Purpose.TRAIN):
                self._decided.setdefault(event.step, {}).setdefault(event.group, event)
            case ev.StepTrained() if event.step not in self._trained:
                for rule, text in (*self._order(event), *self._content(event)) if self._whole(event.step) else ():
                    yield Finding(rule=rule, about=f"step {event.step}", text=text, seq=seq)
                self._trained[event.step] = self._version = event.version
                self._made.add(event.version)
            case ev.WeightsPushed() if self._whole(event.step):
                for text in self._push(event):
                    yield Finding(rule="S24", about=f"version {event.version}", text=text, seq=seq)
            case _:
                pass

    def end(self) -> Iterable[Finding]:
        return ()

    def _whole(self, step: int) -> bool:
        """Whether the journal has all of a step; of the step before one that it was cut to it has what that one stands on."""
        return self._steps is None or step in self._steps

    def _started(self, event: ev.RunStarted) -> None:
        try:
            self._config = parse(event.config)
        except ConfigError:
            return  # the decision check says so

    def _order(self, trained: ev.StepTrained) -> Iterator[tuple[str, str]]:
        if trained.step and trained.step - 1 not in self._trained:
            yield "S21", f"trained before step {trained.step - 1}"
        expected = self._version + (not trained.skipped)
        if trained.version != expected:
            yield "S24", f"leaves version {trained.version}, not {expected}"
        missing = self._groups.get(trained.step, 0) - len(self._decided.get(trained.step, {}))
        if missing:
            yield "S21", f"trained while {missing} of its groups were undecided"

    def _content(self, trained: ev.StepTrained) -> Iterator[tuple[str, str]]:
        try:
            chosen = survivors(self._decided.get(trained.step, {}).values(), self._outcomes)
        except ValueError as e:
            yield "S21", str(e)
            return
        if trained.skipped != (not chosen):
            yield "S21", f"{'skipped with' if trained.skipped else 'trained on'} {len(chosen)} surviving samples"
        yield from self._samples(trained, chosen)
        yield from self._divisor(trained, chosen)
        yield from self._staleness(chosen)

    def _samples(self, trained: ev.StepTrained, chosen: tuple[Survivor, ...]) -> Iterator[tuple[str, str]]:
        if trained.samples != len(trained.sample_digests):
            yield "S21", f"says {trained.samples} samples and lists {len(trained.sample_digests)}"
        tokens = sum(s.merged.sampled for s in chosen)
        if trained.tokens != tokens:
            yield "S21", f"says that it trained on {trained.tokens} tokens; its samples have {tokens} sampled ones"
        expected = {digest: s.merged for s in chosen if (digest := self._digest(s)) is not None}
        counts = Counter(trained.sample_digests)
        for digest, merged in expected.items():
            if digest not in counts:
                yield "S21", f"did not train on {merged.attempt} branch {merged.branch}, which survived"
        for digest, times in counts.items():
            if digest not in expected:
                yield "S21", f"trained on a sample that did not survive ({digest[:12]})"
            if times > 1:
                yield "S21", f"trained {times} times on one sample ({digest[:12]})"
            if (before := self._used.setdefault(digest, trained.step)) != trained.step:
                yield "S21", f"trained on a sample of step {before} again ({digest[:12]})"

    def _digest(self, survivor: Survivor) -> str | None:
        """Digest of the encoded sample; None when it can't be read (the blob check says so)."""
        payload = survivor.merged.sample
        try:
            return payload.digest or digest_of(self._blobs.unpack(payload))
        except BlobError:
            return None

    def _divisor(self, trained: ev.StepTrained, chosen: tuple[Survivor, ...]) -> Iterator[tuple[str, str]]:
        if not chosen or trained.skipped:
            return
        trainer = self._config.trainer
        try:
            divisor = token_weights([s.merged for s in chosen], trainer.loss_reduction, trainer.loss_constant).divisor
        except ReductionError as e:
            yield "S20", str(e)
            return
        if divisor != trained.divisor:
            yield "S20", f"divided by {trained.divisor!r}, not {divisor!r} ({trainer.loss_reduction})"

    def _staleness(self, chosen: tuple[Survivor, ...]) -> Iterator[tuple[str, str]]:
        """Of every sampled token, from the samples themselves."""
        bound = self._config.trainer.max_staleness
        for survivor in chosen:
            try:
                sample = wire.decode(self._blobs.unpack(survivor.merged.sample))
            except (BlobError, wire.SampleError):
                continue  # the token check says so
            versions = sample.versions[sample.mask != 0]
            where = f"{sample.attempt} branch {sample.branch}"
            if len(versions) and self._version - int(versions.min()) > bound:
                yield "S24", f"{where}: a token of version {versions.min()} trained on version {self._version}, bound {bound}"
            if len(versions) and int(versions.max()) > self._version:
                yield "S24", f"{where}: a token of version {versions.max()}, which did not exist yet"

    def _push(self, push: ev.WeightsPushed) -> Iterator[str]:
        if not any(r.ok for r in push.results):
            return
        if push.version not in self._made:
            yield "pushed, but no step made it"
        if push.version < self._pushed:
            yield f"pushed after version {self._pushed}"
        self._pushed = max(self._pushed, push.version)
