"""A whole run in memory: the real scheduler, filter and merger, an in-memory journal, and the other workers played by a few lines.

`World(...).play()` interleaves everybody at random (seeded) until the run ends. Nothing waits and nothing is real but the rules.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rl360.bus import events as ev
from rl360.bus import subjects
from rl360.bus.blobs import BlobStore, digest_of
from rl360.bus.codec import Recorded
from rl360.config import Config, parse, to_toml_data
from rl360.sessions.merger import Merger
from rl360.trainer.draw import TaskRef
from rl360.trainer.group_filter import GroupFilter
from rl360.trainer.groups import Rules, survivors
from rl360.trainer.metrics import StepTally
from rl360.trainer.outcomes import Outcomes
from rl360.trainer.progress import PushGate
from rl360.trainer.reduction import token_weights
from rl360.trainer.schedule import Scheduler, TaskPool

RUN = "world"
SHAPES = [
    [(0, 0, 0), (0, 1, 0)],
    [(0, 0, 0), (0, 1, 0), (1, 1, 0)],  # the third turn continues the first one in another way
    [(0, 0, 0), (0, 1, 0), (0, 1, 2)],  # the third turn drops the second
]
"""Branch, parent and rolled-back turn of each turn of a session."""

Behaviour = Callable[[ev.RolloutAdmitted, random.Random], "float | ev.Cause | None"]
"""Reward of an attempt, the cause of its failure, or None: its runner never answers."""


def coin(admitted: ev.RolloutAdmitted, rng: random.Random) -> float | ev.Cause | None:
    return rng.choice([0.0, 1.0, 1.0, ev.Cause.LOST])


def config_of(**sections: dict[str, object]) -> Config:
    base: dict[str, dict[str, object]] = {
        "run": {"name": RUN, "steps": 3, "seed": 7},
        "tasks": {"pool": 4, "groups_per_step": 3, "attempts_per_group": 4, "eval_every": 2, "eval_attempts": 1},
    }
    return parse({name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})


def pool_of(train: int = 4, held_out: int = 2) -> TaskPool:
    def ref(i: int) -> TaskRef:
        return TaskRef(name=f"task{i}", digest=f"digest{i}", domain=("fix", "look")[i % 2])

    return TaskPool(tuple(map(ref, range(train))), tuple(map(ref, range(train, train + held_out))))


class Journal:
    """Keeps what is published, once for each message id, in order."""

    def __init__(self) -> None:
        self.records: list[Recorded] = []
        self._ids: set[str] = set()
        self.now = 1000.0

    def publish(self, event: ev.Event, *, again: bool = False) -> None:
        key = subjects.msg_id(event)
        if again or key not in self._ids:
            self._ids.add(key)
            self.now += 0.001
            self.records.append(Recorded(len(self.records) + 1, self.now, event))

    def of(self, *types: type[ev.Event]) -> list[ev.Event]:
        return [r.event for r in self.records if isinstance(r.event, types)]


class World:
    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        seed: int = 0,
        behaviour: Behaviour = coin,
        pool: TaskPool | None = None,
        kills: int = 0,
        lost_pushes: int = 0,
    ) -> None:
        self.config, self.behaviour, self.kills, self.lost_pushes = config, behaviour, kills, lost_pushes
        self.pool = pool or pool_of()
        self.rng = random.Random(seed)
        self.blobs = BlobStore(folder / "blobs")
        self.journal = Journal()
        self.in_flight: set[str] = set()
        self.pushes_in_flight: list[set[str]] = []  # what was in flight at each push
        self.sampled_at: dict[str, int] = {}  # attempt -> version of its tokens
        self._start_machines()
        self.gate = PushGate(config.run.schedule, config.run.steps, config.push.every)
        self.outcomes = Outcomes()
        self.tallies: dict[int, StepTally] = {}
        self.version = self.held = 0
        self.trained = -1
        self.todo: list[Iterator[ev.Event]] = []  # what runners are in the middle of
        self._read = 0
        config_data = to_toml_data(config)
        digest = digest_of(json.dumps(config_data, sort_keys=True).encode())
        self.journal.publish(ev.RunStarted(run=RUN, config=config_data, config_digest=digest, code_version="1", seed=config.run.seed))
        self._push(0)

    # ------------------------------------------------------------------------------------------------ workers of ours

    def _start_machines(self) -> None:
        self.scheduler = Scheduler(RUN, self.config, self.pool)
        self.filter = GroupFilter(Rules.of(self.config))
        self.merger = Merger(pack=self.blobs.pack, unpack=self.blobs.unpack, replay=False)
        self._due: dict[str, ev.Event] = {}
        self._machine_read = 0

    def step_machines(self) -> None:
        """The machines fold what is new; what they decided goes out after they have caught up, as `react` does it."""
        while self._machine_read < len(self.journal.records):
            record = self.journal.records[self._machine_read]
            self._machine_read += 1
            self._due.pop(subjects.msg_id(record.event), None)
            for event in (*self.scheduler.on(record), *self.filter.on(record), *self.merger.on(record)):
                self._due[subjects.msg_id(event)] = event
        due, self._due = list(self._due.values()), {}
        for event in (*due, *self.scheduler.on_tick(self.journal.now)):
            self.journal.publish(event)

    # ------------------------------------------------------------------------------------------------ workers played

    def step_others(self) -> None:
        for record in self.journal.records[self._read :]:
            event = record.event
            self.gate.on(event)
            self.outcomes.on(record)
            if isinstance(event, ev.RolloutAdmitted):
                self.in_flight.add(event.attempt)
                self.todo.append(self._attempt(event))
            elif isinstance(event, ev.VerifierResult | ev.InfraFailed):
                self.in_flight.discard(event.attempt)
            elif isinstance(event, ev.StepOpened) and event.purpose is ev.Purpose.TRAIN:
                self.tallies[event.step] = StepTally(event)
            elif isinstance(event, ev.GroupDecided) and event.purpose is ev.Purpose.TRAIN:
                self.tallies[event.step].add(event)
        self._read = len(self.journal.records)
        if self.todo and self.rng.random() < 0.9:
            i = self.rng.randrange(len(self.todo))
            event = next(self.todo[i], None)
            if event is None:
                del self.todo[i]
            else:
                self.journal.publish(event)
        else:
            self._trainer()

    def _attempt(self, a: ev.RolloutAdmitted) -> Iterator[ev.Event]:
        session = ev.session_id(a.attempt, 1)
        self.sampled_at[a.attempt] = self.held
        result = self.behaviour(a, self.rng)
        about = {"run": RUN, "step": a.step, "attempt": a.attempt, "group": a.group, "session": session}
        if result is None:
            return
        yield ev.RolloutPhase(**about, phase=ev.Phase.SETUP, start=1.0, end=2.0)
        if isinstance(result, ev.Cause):
            yield ev.InfraFailed(**about, boundary=ev.Boundary.SANDBOX, cause=result, exception="SandboxLost")
            return
        turns = self.turns(about, self.rng.choice(SHAPES))
        yield from turns
        yield ev.SessionClosed(**about, reason="submitted", turns=len(turns), branches=max(t.branch for t in turns) + 1)
        yield verified(a.attempt, result, step=a.step, group=a.group)
        if self.rng.random() < 0.2:  # another life of it, whose runner knew nothing of the first
            yield failed(a.attempt, step=a.step, group=a.group, life=2)

    def turns(self, about: dict[str, object], shape: Sequence[tuple[int, int, int]]) -> list[ev.TurnCompleted]:
        """Turns of random tokens. Some are cut off: what comes after them drops out (S7)."""
        version = self.sampled_at[str(about["attempt"])]
        made: list[ev.TurnCompleted] = []
        for turn, (branch, parent, rolled_back) in enumerate(shape, start=1):
            base = made[parent - 1].base + made[parent - 1].prompt_ids.size // 4 + made[parent - 1].output_ids.size // 4 if parent else 0
            prompt = np.array([self.rng.randrange(90) for _ in range(self.rng.randint(2, 5))], np.int32)
            output = np.array([self.rng.randrange(90) for _ in range(self.rng.randint(1, 6))], np.int32)
            logprobs = np.array([-self.rng.random() for _ in output], np.float32)
            made.append(
                ev.TurnCompleted(
                    **about,
                    turn=turn,
                    branch=branch,
                    parent=parent,
                    base=base,
                    prompt_ids=self.blobs.pack(prompt.tobytes()),
                    output_ids=self.blobs.pack(output.tobytes()),
                    logprobs=self.blobs.pack(logprobs.tobytes()),
                    spans=(ev.VersionSpan(version, 0, len(output)),),
                    finish_reason="length" if self.rng.random() < 0.1 else "stop",
                    rolled_back=rolled_back,
                    cached_tokens=base,
                    prompt_tokens=base + len(prompt),
                    best_cached=base,
                    generation="engine0-1",
                    request_id=f"{about['session']}:{turn}",
                    started=1.0,
                    ended=2.0,
                )
            )
        return made

    def _push(self, version: int) -> None:
        if version == 0:
            self.journal.publish(ev.EngineJoined(run=RUN, generation="engine0-1", url="http://127.0.0.1:1"))
        self.pushes_in_flight.append(set(self.in_flight))
        lost = version > 0 and self.lost_pushes > 0 and self.rng.random() < 0.5
        self.lost_pushes -= lost
        result = ev.PushResult(generation="engine0-1", ok=not lost, checksum="x")
        self.journal.publish(
            ev.WeightsPushed(
                run=RUN,
                version=version,
                plan="p",
                path="broadcast",
                attempt=1 + sum(e.version == version for e in self.journal.of(ev.WeightsPushed)),
                checksum="x",
                results=(result,),
                pause_seconds=0,
                seconds=0,
            )
        )
        self.held = self.held if lost else version
        if version == 0:
            self.journal.publish(ev.EngineReady(run=RUN, generation="engine0-1", url="http://127.0.0.1:1", version=0, checksum="x"))

    def _trainer(self) -> None:
        if self.version > self.held and self.rng.random() < 0.5 and self.gate.may_push():
            self._push(self.version)
            return
        tally = self.tallies.get(self.trained + 1)
        if tally is None or not tally.complete:
            return
        self.trained += 1
        self.journal.publish(self._train(self.trained))

    def _train(self, step: int) -> ev.StepTrained:
        decided = [e for e in self.journal.of(ev.GroupDecided) if e.step == step and e.purpose is ev.Purpose.TRAIN]
        chosen = survivors(decided, self.outcomes)
        about = {"run": RUN, "step": step, "loss": 0.0, "grad_norm": 1.0, "metrics": {}, "seconds": {}, "checkpoint": "c"}
        if not chosen:
            return ev.StepTrained(**about, version=self.version, samples=0, tokens=0, divisor=0.0, skipped=True, why="no group was kept")
        self.version += 1
        trainer = self.config.trainer
        return ev.StepTrained(
            **about,
            version=self.version,
            samples=len(chosen),
            tokens=sum(s.merged.sampled for s in chosen),
            divisor=token_weights([s.merged for s in chosen], trainer.loss_reduction, trainer.loss_constant).divisor,
            sample_digests=tuple(digest_of(self.blobs.unpack(s.merged.sample)) for s in chosen),
        )

    # ------------------------------------------------------------------------------------------------ the whole

    def play(self, limit: int = 20_000) -> Journal:
        """Until RunFinished. Everybody acts in random turns; now and then the machines die and start again."""
        for _ in range(limit):
            if self.rng.random() < 0.5:
                self.step_others()
            else:
                if self.kills and self.rng.random() < 0.02:
                    self.kills -= 1
                    self._start_machines()
                self.step_machines()
            self.journal.now += 0.05
            if self.journal.of(ev.RunFinished):
                return self.journal
        raise AssertionError(f"the run did not end: {[type(r.event).__name__ for r in self.journal.records[-10:]]}")


# ---------------------------------------------------------------------------------------------------- single events


def receipt() -> ev.Receipt:
    return ev.Receipt(file="reward.txt", file_digest="f", verifier_digest="v", exit_status=0, agent_dead_at=1.0, written_at=2.0)


def verified(
    attempt: str, reward: float, *, step: int = 0, group: int = 0, end: ev.AgentEnd = ev.AgentEnd.SUBMITTED, life: int = 1
) -> ev.VerifierResult:
    return ev.VerifierResult(
        run=RUN,
        step=step,
        attempt=attempt,
        group=group,
        session=ev.session_id(attempt, life),
        reward=reward,
        low=0.0,
        high=1.0,
        receipt=receipt(),
        exit_status=0,
        agent_end=end,
    )


def failed(attempt: str, *, step: int = 0, group: int = 0, cause: ev.Cause = ev.Cause.LOST, life: int = 1) -> ev.InfraFailed:
    return ev.InfraFailed(
        run=RUN,
        step=step,
        attempt=attempt,
        group=group,
        session=ev.session_id(attempt, life),
        boundary=ev.Boundary.SANDBOX,
        cause=cause,
        exception="SandboxLost",
    )


def trajectory(
    attempt: str, *, step: int = 0, group: int = 0, branch: int = 0, branches: int = 1, sampled: int = 3, version: int = 0, errors: int = 0
) -> ev.TrajectoryMerged:
    """Without a readable sample: enough for decisions."""
    return ev.TrajectoryMerged(
        run=RUN,
        step=step,
        attempt=attempt,
        group=group,
        session=ev.session_id(attempt, 1),
        branch=branch,
        tokens=sampled + 2,
        sampled=sampled,
        turns=1,
        dropped_turns=0,
        format_errors=errors,
        min_version=version if sampled else -1,
        max_version=version if sampled else -1,
        sample=BlobStore.pack(None, b""),  # type: ignore[arg-type]  # inline: no store is touched
        branches=branches,
    )
