"""The sections of a recipe: every key, what it takes and its default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rl360.errors import InputError

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
RunName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,47}$")]


class ConfigError(InputError):
    """A recipe that can't run: the message names the key, why, and the remedy."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections of a recipe."""


class Run(Section, frozen=True, kw_only=True):
    name: RunName = "run"  # becomes part of subjects, stream names and paths
    seed: int = 0
    steps: Positive = 25
    schedule: Literal["sync", "one_step"] = "sync"


class Tasks(Section, frozen=True, kw_only=True):
    """`source` is "tiny_shell" (generated from `seed`) or a folder of Harbor-format tasks."""

    source: str = "tiny_shell"
    eval_source: str = ""  # a folder of held-out tasks; empty: generated, or none
    seed: int = 0
    pool: Positive = 32  # training tasks generated
    eval_pool: NonNegative = 24
    groups_per_step: Positive = 32
    attempts_per_group: Annotated[int, Meta(ge=2)] = 8
    eval_every: NonNegative = 5  # steps; 0: never
    eval_attempts: Positive = 2  # attempts for each held-out task
    qualify: bool = True  # no-op must give the lowest reward, the oracle the highest


class Policy(Section, frozen=True, kw_only=True):
    """`path`: a folder in HF layout; empty: the starting policy shipped with RL360.

    `experts` above 0: a run starts from that dense policy with so many experts a layer, made when its folder is (tiny/upcycle.py).
    """

    path: str = ""
    experts: NonNegative = 0
    experts_per_token: Positive = 2

    @property
    def folder(self) -> Path:
        """The folder to read: config.json, tokenizer.json, model.safetensors."""
        return Path(self.path) if self.path else Path(__file__).parents[1] / "tiny" / "policy"


class Sampling(Section, frozen=True, kw_only=True):
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    max_new_tokens: Positive = 64
    context: Positive = 512  # tokens of a whole conversation


class BudgetSection(Section, frozen=True, kw_only=True):
    """Seconds for each phase of an attempt (S15). `outer` is the last deadline; 0: the sum plus `margin`."""

    queue: Seconds = 300.0
    setup: Seconds = 30.0
    agent: Seconds = 120.0
    verify: Seconds = 60.0
    collect: Seconds = 30.0
    margin: Annotated[float, Meta(ge=0)] = 15.0
    outer: Annotated[float, Meta(ge=0)] = 0.0


class Waves(Section, frozen=True, kw_only=True):
    """Attempts are admitted `size` at a time, `interval` seconds apart, while fewer than `max_starting` are starting.

    A sandbox that doesn't start is tried `tries` times in all; the first retry waits up to `retry_seconds`, each later one twice as long.
    """

    size: Positive = 32
    interval: Annotated[float, Meta(ge=0)] = 0.1
    max_starting: Positive = 64
    max_pulls: NonNegative = 0  # images pulled (or built) at once, over all runners: what the registry bears; 0: as many as start
    tries: Positive = 3
    retry_seconds: Seconds = 2.0


class HarborAgent(Section, frozen=True, kw_only=True):
    """An agent of Harbor's, run in a process of its own by a Python >= 3.12 that has the `harbor` extra."""

    agent: str = "terminus-2"  # Harbor's name of it, or module:Class
    python: str = ""  # an interpreter that has harbor; empty: the runner's own
    args: dict[str, str | int | float | bool] = {}  # more arguments of the agent's, such as parser_name = "xml"


class Agent(Section, frozen=True, kw_only=True):
    harness: Literal["mini_swe", "scripted", "openai_url", "harbor"] = "mini_swe"
    command: str = ""  # harness "openai_url": the agent's command line, run inside the sandbox
    script: tuple[str, ...] = ()  # harness "scripted": shell commands, "oracle", "ask" or "ask: text"
    harbor: HarborAgent = HarborAgent()  # harness "harbor"
    max_turns: Positive = 8
    system: str = "You are a coding agent. Use the bash tool."
    observation_limit: Positive = 200  # characters of a command's output that the agent sees
    command_timeout: Seconds = 10.0
    agent_timeout: Literal["verify", "mask", "zero"] = "verify"  # S14
    truncation: Literal["verify", "mask", "zero"] = "verify"  # S14
    max_lives: Positive = 3  # an attempt is started again this often when its runner dies


class Reward(Section, frozen=True, kw_only=True):
    """Shaping on top of what the verifier wrote; both numbers stay in the journal."""

    format_error_penalty: Annotated[float, Meta(ge=0)] = 0.0  # taken off a passed attempt that made a format error


class Sandbox(Section, frozen=True, kw_only=True):
    kind: Literal["bwrap", "docker", "subprocess"] = "bwrap"
    image: str = ""  # docker: of tasks that bring neither an image nor a Dockerfile
    memory_mb: Positive = 256
    storage_mb: Positive = 256  # MiB in memory, beside memory_mb, that an agent may add to its workdir
    pids: Positive = 64
    cpus: Annotated[float, Meta(gt=0)] = 1.0

    @property
    def reserved_mb(self) -> int:
        """MiB of a node's memory that a sandbox of the largest size may use: a container's workdir is on disk."""
        return self.memory_mb + (0 if self.kind == "docker" else self.storage_mb)


class Sessions(Section, frozen=True, kw_only=True):
    count: Positive = 1
    template: str = "k2v3"
    divergence: Literal["branch", "reject"] = "branch"  # S4
    max_body_mb: Positive = 8


class Runners(Section, frozen=True, kw_only=True):
    count: Positive = 2
    slots: Positive = 32  # attempts at once in one runner
    memory_mb: NonNegative = 0  # MiB of its node that the sandboxes of one runner may reserve together; 0: not reserved
    cpus: Annotated[float, Meta(ge=0)] = 0.0  # likewise; who runs two runners on a node gives each a part of it


class SGLang(Section, frozen=True, kw_only=True):
    """Servers of `engine.kind = "sglang"`, one an engine. Engine i takes the GPUs from `first_gpu` + i x `tp` on.

    What the rest of a recipe decides (model, dtype, context, requests at once, expert rows) is not repeated here.
    """

    python: str = ""  # an interpreter that has SGLang; empty: the worker's own
    host: str = "127.0.0.1"  # where gateway and trainer reach it
    device: Literal["cuda", "cpu"] = "cuda"
    first_gpu: NonNegative = 0
    tp: Positive = 1
    ep: Positive = 1  # of the tp ranks, blocks that share a layer's experts
    mem_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.8  # of a GPU's memory, for weights and KV
    args: tuple[str, ...] = ()  # more arguments of sglang.launch_server, as they stand
    env: dict[str, str] = {}


class Engine(Section, frozen=True, kw_only=True):
    kind: Literal["tiny", "sglang"] = "tiny"
    count: Positive = 1
    ep: Positive = 1  # tiny: ranks of an engine in a push, which share out a layer's experts
    slots: Positive = 64  # tiny: sessions whose KV is kept; sglang: requests that run at once
    dtype: Literal["float32", "bfloat16"] = "float32"
    lease_seconds: Seconds = 5.0
    start_seconds: Seconds = 300.0  # from its start until it joins; then it is started again
    min_healthy: Positive = 1  # the run stops when fewer engines are left with restarts (supervise.max_restarts)
    request_timeout: Seconds = 60.0
    routed_experts: bool = False
    sglang: SGLang = SGLang()


class Gateway(Section, frozen=True, kw_only=True):
    kind: Literal["smg"] = "smg"


class Trainer(Section, frozen=True, kw_only=True):
    """`dp` x `tp` x `pp` x `cp` ranks; `ep` of them share a layer's experts (see trainer/layout.py)."""

    dp: Positive = 1
    tp: Positive = 1
    pp: Positive = 1
    ep: Positive = 1
    cp: Positive = 1
    distributed_optimizer: bool = False  # Adam's state is spread over data-parallel ranks
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations; gradients and Adam's state are float32
    lr: Annotated[float, Meta(gt=0)] = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    clip_grad: Annotated[float, Meta(gt=0)] = 1.0
    microbatch_tokens: Positive = 8192
    recompute: Literal["none", "full"] = "none"  # "full": keep a layer's input only, run the layer again in the backward
    routing_replay: bool = False  # S11: train with the experts that the engines recorded
    loss_reduction: Literal["sample_mean", "token_mean", "constant"] = "token_mean"  # S20
    loss_constant: Annotated[float, Meta(ge=0)] = 0.0  # divisor per sample for loss_reduction = "constant"
    advantage_std: bool = False  # S19
    eps_low: Annotated[float, Meta(ge=0)] = 0.2
    eps_high: Annotated[float, Meta(ge=0)] = 0.28
    tis_cap: Annotated[float, Meta(gt=0)] = 2.0
    tis_floor: Annotated[float, Meta(ge=0)] = 0.0
    old_policy: Literal["sampler", "keep_old_actor"] = "sampler"  # S22
    copies: Literal["cpu", "gpu"] = "cpu"  # where copies of older weights lie, for keep_old_actor, kl_coef and engines that join late
    kl_coef: Annotated[float, Meta(ge=0)] = 0.0
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    max_staleness: NonNegative = 1  # S24
    logp_alarm: Annotated[float, Meta(gt=0)] = 1e-4  # alarm when max |Δ log p| exceeds it

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


class Push(Section, frozen=True, kw_only=True):
    path: Literal["broadcast", "direct", "shared_memory"] = "broadcast"
    """"direct": experts go straight to the GPUs that serve them, where engines can take them so (else "broadcast", and `PlanBuilt` says
    why); "shared_memory": for SGLang engines on the trainer's own GPUs."""
    every: Positive = 1  # steps between two pushes; the last step's version is pushed in any case
    bucket_mb: Annotated[float, Meta(gt=0)] = 512.0
    timeout: Seconds = 60.0  # of a whole push, retries included
    call_timeout: Seconds = 15.0  # of one call to an engine, and of one bucket's broadcast


class Supervise(Section, frozen=True, kw_only=True):
    max_restarts: NonNegative = 5  # of one worker, before the run stops with a clear error
    drain_seconds: Seconds = 15.0
    hang_seconds: Annotated[float, Meta(ge=5)] = 300.0  # without a sign of life, after which a process is killed and started again
    min_free_mb: NonNegative = 512  # MiB free on the run's disks, below which it stops before something is lost


FaultKind = Literal["sandbox_kill", "sandbox_hang", "verifier_break", "verifier_hang", "engine_kill", "engine_hang"]


class Fault(Section, frozen=True, kw_only=True):
    """An outage on cue, for drills: at training step `step` it strikes `fraction` of the attempts, or of the engines.

    Whom it strikes follows from the seed and the names (`rl360.agents.faults`); what it does is real.
    """

    step: NonNegative
    kind: FaultKind
    fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    domain: str = ""  # only attempts at tasks of this domain; empty: any

    @property
    def of_engines(self) -> bool:
        return self.kind.startswith("engine_")


class Telemetry(Section, frozen=True, kw_only=True):
    otlp_endpoint: str = ""  # http://host:4318; empty: no export


class Config(Section, frozen=True, kw_only=True):
    """A whole recipe."""

    run: Run = Run()
    tasks: Tasks = Tasks()
    policy: Policy = Policy()
    sampling: Sampling = Sampling()
    budgets: BudgetSection = BudgetSection()
    waves: Waves = Waves()
    agent: Agent = Agent()
    reward: Reward = Reward()
    sandbox: Sandbox = Sandbox()
    sessions: Sessions = Sessions()
    runners: Runners = Runners()
    engine: Engine = Engine()
    gateway: Gateway = Gateway()
    trainer: Trainer = Trainer()
    push: Push = Push()
    supervise: Supervise = Supervise()
    telemetry: Telemetry = Telemetry()
    faults: tuple[Fault, ...] = ()
