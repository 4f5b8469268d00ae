"""Every event of a run, as one tagged union (tag = the type's name).

A type never changes meaning: new fields get defaults, and `schemas/` keeps the published shape.
Times are unix seconds, digests are blake3 hex, sizes are bytes. `step` is -1 where an event belongs to no step.

Who an event is about:
    attempt   "t12-g003-a5"   (t: trained, e: held-out evaluation; step, group, attempt index), see `attempt_id`
    session   "t12-g003-a5.1" (attempt and life: a redelivered attempt starts again in a fresh session)
    generation "engine0-17c3" (one life of one engine process)
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Union

import msgspec

from rl360.bus.payload import Payload

SCHEMA_VERSION = 1


class Boundary(StrEnum):
    """Where a failure was seen (S13)."""

    QUEUE = "queue"
    SANDBOX = "sandbox"
    AGENT = "agent"
    SESSION = "session"
    GATEWAY = "gateway"
    ENGINE = "engine"
    VERIFIER = "verifier"
    COLLECT = "collect"
    BUS = "bus"


class Cause(StrEnum):
    """Closed list of infrastructure causes (S13); the raw exception name stands beside it in `InfraFailed.exception`."""

    TIMEOUT = "timeout"  # the clock of the phase ran out
    START_FAILED = "start_failed"
    LOST = "lost"  # the process, container or connection went away
    REFUSED = "refused"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    NO_REWARD = "no_reward"  # the verifier ended without writing one
    BAD_REWARD = "bad_reward"  # not a finite number in the declared range
    FORGED_REWARD = "forged_reward"  # written by something other than the verifier (S17)
    BAD_TASK = "bad_task"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"  # redelivered too often (poison task)
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class AgentEnd(StrEnum):
    """Why the agent stopped. It is a fact beside the verdict, never instead of it (S14)."""

    SUBMITTED = "submitted"
    TURNS = "turns"  # ran out of turns
    LENGTH = "length"  # a reply was cut off; the session refuses further turns (S7)
    CONTEXT = "context"  # the conversation no longer fits the context
    TIMEOUT = "timeout"  # the agent's own budget ran out
    ERROR = "error"  # the agent program failed by itself


class Fate(StrEnum):
    """What finally happened to an attempt."""

    TRAINED = "trained"
    DROPPED = "dropped"
    MASKED = "masked"
    STALE = "stale"


class DropReason(StrEnum):
    """Why a group does not train (S18)."""

    INSUFFICIENT_VALID = "insufficient_valid"
    ALL_PASS = "all_pass"
    ALL_FAIL = "all_fail"
    NO_DISAGREEMENT = "no_disagreement"
    STALE = "stale"


class Phase(StrEnum):
    """Phases of an attempt, in order, each with its own clock (S15)."""

    QUEUE = "queue"
    SETUP = "setup"
    AGENT = "agent"
    VERIFY = "verify"
    COLLECT = "collect"


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""

    run: str
    step: int = -1


class OfAttempt(Event, frozen=True, kw_only=True):
    """About one attempt."""

    attempt: str
    group: int


class OfSession(OfAttempt, frozen=True, kw_only=True):
    """About one life of an attempt."""

    session: str


# ------------------------------------------------------------------------------------------------ run and step


class RunStarted(Event, frozen=True, kw_only=True):
    config: dict[str, Any]
    config_digest: str
    code_version: str
    seed: int
    resumed: int = 0  # how many times this run was resumed before


class RunFinished(Event, frozen=True, kw_only=True):
    why: str  # "steps" | "interrupted" | "failed: ..."
    steps: int
    resumed: int = 0  # of the `RunStarted` that this one ends


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a step."""

    group: int
    task: str  # name of the task
    digest: str  # of the task's directory
    domain: str  # kind of task, for per-domain means
    attempts: int


class StepOpened(Event, frozen=True, kw_only=True):
    version: int  # policy version that the step's rollouts start from
    groups: tuple[GroupSpec, ...]
    purpose: Purpose = Purpose.TRAIN


class StepClosed(Event, frozen=True, kw_only=True):
    requested: int
    valid: int
    masked: int
    infra: int
    kept: int
    skipped: bool = False
    why: str = ""
    purpose: Purpose = Purpose.TRAIN


# ------------------------------------------------------------------------------------------------ rollouts


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds each phase may take, each clock starting with its phase, and the outer deadline (S15)."""

    queue: float
    setup: float
    agent: float
    verify: float
    collect: float
    margin: float

    @property
    def outer(self) -> float:
        return self.queue + self.setup + self.agent + self.verify + self.collect + self.margin


class Rollout(OfAttempt, frozen=True, kw_only=True):
    """What an attempt is to do."""

    index: int
    task: str
    digest: str
    budgets: Budgets
    purpose: Purpose = Purpose.TRAIN


class RolloutRequested(Rollout, frozen=True, kw_only=True):
    """The step asks for this attempt."""


class RolloutAdmitted(Rollout, frozen=True, kw_only=True):
    """A runner may start it."""

    wave: int
    admitted: float
    node: str = ""


class RolloutPhase(OfSession, frozen=True, kw_only=True):
    """A phase of an attempt ended (or, with `end` None, began)."""

    phase: Phase
    start: float
    end: float | None = None
    node: str = ""

    @property
    def ended(self) -> bool:
        """A session begins and ends each phase once, whoever says so."""
        return self.end is not None


# ------------------------------------------------------------------------------------------------ sessions


class SessionOpened(OfSession, frozen=True, kw_only=True):
    template: str
    sampling: dict[str, float | int]
    min_version: int = 0


class SessionClosed(OfSession, frozen=True, kw_only=True):
    reason: str
    turns: int  # highest turn number published, over all branches
    branches: int = 1


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, end) of a turn were sampled by policy `version`."""

    version: int
    start: int
    end: int


class TurnCompleted(OfSession, frozen=True, kw_only=True):
    """One model call. Token arrays are little-endian: ids int32, log-probs float32."""

    turn: int  # 1, 2, ... in the order of commitment within the session
    branch: int
    parent: int  # turn that this one continues; 0 = none. A turn that is nobody's ancestor was rolled back
    base: int  # tokens of the parent kept before `prompt_ids` (the parent's prompt and output, whole)
    prompt_ids: Payload  # tokens appended after the parent: mask 0
    output_ids: Payload  # sampled tokens, the stop token included: mask 1
    logprobs: Payload
    spans: tuple[VersionSpan, ...]
    finish_reason: str  # stop | length | abort
    cached_tokens: int
    prompt_tokens: int  # whole prompt, kept part included
    best_cached: int  # the most a perfect prefix cache could have held
    generation: str
    request_id: str
    started: float
    ended: float
    format_error: bool = False  # the reply tried to call a tool and did not parse
    rolled_back: int = 0  # turn that this request dropped from the history (S4)
    retries: int = 0  # times the engine call was sent again
    history: str = ""  # digest of the messages that this turn answers: how a rebuilt session knows them (S4, S5)


class RoutingDelta(OfSession, frozen=True, kw_only=True):
    """Expert choices of rows [first, first + rows) of a session (S9, S10)."""

    turn: int
    first: int
    rows: int
    layers: int
    topk: int
    dtype: str  # uint8 | uint16
    data: Payload
    overlap_rows: int = 0
    overlap_mismatch: int = 0


# ------------------------------------------------------------------------------------------------ outcomes


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that the verifier wrote the reward, after the agent was dead (S12, S17)."""

    file: str
    file_digest: str
    verifier_digest: str
    exit_status: int
    agent_dead_at: float
    written_at: float


class StepVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the verifier of one step of several wrote."""

    step: str
    reward: float
    receipt: Receipt


class VerifierResult(OfSession, frozen=True, kw_only=True):
    """Of a task of several steps, `reward` is what its strategy makes of those in `steps`, and `receipt` is the last one's."""

    reward: float
    low: float
    high: float
    receipt: Receipt
    exit_status: int
    agent_end: AgentEnd
    node: str = ""
    teardown_error: str = ""
    steps: tuple[StepVerdict, ...] = ()


class InfraFailed(OfSession, frozen=True, kw_only=True):
    """A typed failure. There is no reward field, so it can't be averaged in as a 0 (S12)."""

    boundary: Boundary
    cause: Cause
    exception: str
    detail: str = ""
    node: str = ""
    generation: str = ""
    image: str = ""
    agent_end: AgentEnd | None = None
    teardown_error: str = ""


class StartRetried(OfSession, frozen=True, kw_only=True):
    """A sandbox did not start, for a reason that may pass: it is tried again at `due` (unix seconds). `tries` failed so far."""

    tries: int
    boundary: Boundary
    cause: Cause
    exception: str
    detail: str
    due: float
    node: str = ""


class TrajectoryMerged(OfSession, frozen=True, kw_only=True):
    """One sample: one branch of the session of a finished attempt (S6). `sample` holds a packed `Sample`."""

    branch: int
    tokens: int
    sampled: int
    turns: int
    dropped_turns: int
    format_errors: int
    min_version: int
    max_version: int
    sample: Payload
    routing: Payload | None = None
    branches: int = 1  # how many samples this attempt has in all
    cached_tokens: int = 0
    best_cached: int = 0
    prompt_tokens: int = 0
    cut_tokens: int = 0  # tokens cut off the end because the engine returned no expert rows for them


class AttemptDecision(msgspec.Struct, frozen=True, kw_only=True):
    attempt: str
    fate: Fate
    reason: str = ""
    raw_reward: float | None = None  # what the verifier wrote
    reward: float | None = None  # after the recipe's shaping; feeds filter, baseline, advantage
    advantage: float | None = None


class GroupDecided(Event, frozen=True, kw_only=True):
    group: int
    domain: str
    kept: bool
    reason: str = ""
    baseline: float | None = None
    n_valid: int = 0
    attempts: tuple[AttemptDecision, ...] = ()
    purpose: Purpose = Purpose.TRAIN


# ------------------------------------------------------------------------------------------------ training and push


class StepTrained(Event, frozen=True, kw_only=True):
    version: int  # after the step; unchanged when skipped
    samples: int
    tokens: int
    divisor: float
    loss: float
    grad_norm: float
    metrics: dict[str, float]
    seconds: dict[str, float]
    checkpoint: str  # path relative to the run's folder
    sample_digests: tuple[str, ...] = ()
    skipped: bool = False
    why: str = ""


class EngineShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine generation receives in one push."""

    generation: str
    calls: int
    bytes: int


class PlanBuilt(Event, frozen=True, kw_only=True):
    plan: str  # digest of the plan
    generations: tuple[str, ...]
    path: str  # broadcast | direct
    why: str
    shares: tuple[EngineShare, ...]


class PushResult(msgspec.Struct, frozen=True, kw_only=True):
    generation: str
    ok: bool
    checksum: str = ""
    error: str = ""
    calls: int = 0
    bytes: int = 0


class WeightsPushed(Event, frozen=True, kw_only=True):
    """Version `version` is held by every engine whose result is ok. A catch-up push repeats a version for a joiner."""

    version: int
    plan: str
    path: str
    attempt: int  # counts pushes of this version
    checksum: str
    results: tuple[PushResult, ...]
    pause_seconds: float
    seconds: float


class EngineJoined(Event, frozen=True, kw_only=True):
    generation: str
    url: str
    pid: int = 0
    node: str = ""


class EngineReady(Event, frozen=True, kw_only=True):
    generation: str
    url: str
    version: int
    checksum: str


class EngineLost(Event, frozen=True, kw_only=True):
    generation: str
    cause: str


class EngineFenced(Event, frozen=True, kw_only=True):
    generation: str
    cause: str


class WorkerRestarted(Event, frozen=True, kw_only=True):
    """The supervisor started a worker again."""

    worker: str
    restarts: int
    exit_status: int
    cause: str
    resumed: int = 0


class JournalRewound(Event, frozen=True, kw_only=True):
    """The run goes on with a journal that lost its end: what follows from the rest is recorded again, attempts start a new life."""

    lost: int  # newest sequence that the run is known to have recorded before
    kept: int  # newest sequence that the journal still holds
    checkpoints: tuple[str, ...] = ()  # set aside, since they were made from events that are lost
    resumed: int = 0


class WorkerGivenUp(Event, frozen=True, kw_only=True):
    """An engine's restarts are used up; the run goes on without it."""

    worker: str
    exit_status: int
    cause: str
    resumed: int = 0


class LimitNotEnforced(Event, frozen=True, kw_only=True):
    """Sandboxes on a node go without a limit that this machine can't enforce: they are weaker than the recipe says."""

    node: str
    limit: str  # what is not bounded
    why: str  # and the remedy


class LateOutcome(OfSession, frozen=True, kw_only=True):
    """A terminal outcome that came after the first one of its attempt: counted, changes nothing (S16)."""

    kind: str
    first_seq: int


class FaultInjected(Event, frozen=True, kw_only=True):
    """A fault of the recipe's plan strikes: published before it does, so that nobody takes it for an outage."""

    fault: int  # its place in the recipe's list
    kind: str
    target: str  # the session, or the engine's worker, that is struck
    attempt: str | None = None
    group: int | None = None


class BlobsPruned(Event, frozen=True, kw_only=True):
    """Retention removes the blobs and checkpoints that only steps `first` to `last` need. Published before it does; `step` stays -1."""

    first: int
    last: int
    kept: tuple[int, ...]  # pinned steps among them
    blobs: int
    blob_bytes: int
    checkpoints: tuple[str, ...]  # folder names
    checkpoint_bytes: int


AnyEvent = Union[  # noqa: UP007  (msgspec reads it at run time; one member a line keeps diffs small)
    RunStarted,
    RunFinished,
    StepOpened,
    StepClosed,
    RolloutRequested,
    RolloutAdmitted,
    RolloutPhase,
    SessionOpened,
    SessionClosed,
    TurnCompleted,
    RoutingDelta,
    VerifierResult,
    InfraFailed,
    TrajectoryMerged,
    GroupDecided,
    StepTrained,
    PlanBuilt,
    WeightsPushed,
    EngineJoined,
    EngineReady,
    EngineLost,
    EngineFenced,
    WorkerRestarted,
    LateOutcome,
    FaultInjected,
    WorkerGivenUp,
    JournalRewound,
    BlobsPruned,
    StartRetried,
    LimitNotEnforced,
]

EVENT_TYPES: dict[str, type[Event]] = {t.__name__: t for t in AnyEvent.__args__}  # type: ignore[attr-defined]


def attempt_id(purpose: Purpose, step: int, group: int, index: int) -> str:
    """Name of an attempt, unique in a run.

    >>> attempt_id(Purpose.TRAIN, 12, 3, 5)
    't12-g003-a5'
    """
    return f"{'t' if purpose is Purpose.TRAIN else 'e'}{step}-g{group:03d}-a{index}"


def session_id(attempt: str, life: int) -> str:
    """Name of the session of one life of an attempt.

    >>> session_id("t12-g003-a5", 1)
    't12-g003-a5.1'
    """
    return f"{attempt}.{life}"


def life_of(session: str) -> int:
    """Life number in a session's name; 0 when there is none.

    >>> life_of("t12-g003-a5.2")
    2
    """
    life = session.rpartition(".")[2]
    return int(life) if life.isascii() and life.isdecimal() else 0
