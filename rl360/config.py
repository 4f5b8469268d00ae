"""The recipe of a run: one typed TOML file, `--set a.b=c` on top, everything refused that can't run.

`load` raises ConfigError with the key, the reason and the nearest valid key, before anything starts.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_args, get_type_hints

import msgspec
from msgspec import Meta

from rl360.errors import InputError

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
RunName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,47}$")]


# fmt: off
SGLANG_OWN: Final = frozenset({
    "--model", "--model-path", "--served-model-name", "--host", "--port", "--device", "--dtype", "--context-length", "--random-seed",
    "--max-running-requests", "--tp", "--tp-size", "--tensor-parallel-size", "--ep", "--ep-size", "--expert-parallel-size",
    "--dp-size", "--pp-size", "--base-gpu-id", "--mem-fraction-static", "--weight-version", "--enable-return-routed-experts",
})
# fmt: on
"""Arguments of SGLang's server that RL360 sets, or under which it can't push weights."""


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
        return Path(self.path) if self.path else Path(__file__).parent / "tiny" / "policy"


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


class Agent(Section, frozen=True, kw_only=True):
    harness: Literal["mini_swe", "scripted", "openai_url"] = "mini_swe"
    command: str = ""  # harness "openai_url": the agent's command line, run inside the sandbox
    script: tuple[str, ...] = ()  # harness "scripted": shell commands, "oracle", "ask" or "ask: text"
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


S = TypeVar("S", bound=Section)


def load(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a recipe, apply `a.b=value` overrides, check everything."""
    sections = ", ".join(get_type_hints(Config))
    data = read_toml(path, str(path), f"a recipe is TOML with sections of {sections}: see recipes/")
    for item in overrides:
        override(data, item)
    return parse(data, where=str(path))


def read_toml(path: Path, where: str, remedy: str) -> dict[str, Any]:
    """A TOML document that says something. Raises ConfigError: the place (`where`), what is wrong, the remedy."""
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except OSError as e:
        raise ConfigError(f"{where}: can't be read ({e.strerror}); {remedy}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{where}: not valid TOML: {e}; {remedy}") from None
    if not data:
        raise ConfigError(f"{where}: is empty; {remedy}")
    return data


def parse(data: dict[str, Any], where: str = "recipe") -> Config:
    """Typed config of a parsed TOML document."""
    config = convert(data, Config, where)
    _check(config, where)
    return config


def convert(data: dict[str, Any], kind: type[S], where: str) -> S:
    """A section of a parsed document. Raises ConfigError naming an unknown key and the nearest valid one, or a wrong value."""
    _refuse_unknown(data, kind, where, ())
    _refuse_unrecordable(data, where, "")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {_readable(str(e))}") from None


def to_toml_data(config: Config) -> dict[str, Any]:
    """Plain data of a config (every key, defaults included)."""
    return cast(dict[str, Any], msgspec.to_builtins(config))


def override(data: dict[str, Any], item: str) -> None:
    """Put `section.key=value` into a parsed document. Raises ConfigError."""
    key, eq, value = item.partition("=")
    if not eq or not key:
        raise ConfigError(f"--set {item!r}: write it as section.key=value")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *path, last = key.split(".")
    for part in path:
        below = data.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {item!r}: {part!r} is a value, not a section")
        data = cast(dict[str, Any], below)
    data[last] = parsed


def _refuse_unknown(data: dict[str, Any], struct: type[Section], where: str, path: tuple[str, ...]) -> None:
    hints = get_type_hints(struct)
    for key, value in data.items():
        if key not in hints:
            name = ".".join((*path, key))
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.5) or _elsewhere(key)
            hint = f"; did you mean {_full(near[0], hints, path)}?" if near else ""
            raise ConfigError(f"{where}: unknown key {name!r}{hint} (valid here: {', '.join(hints)})")
        below = hints[key]
        if isinstance(below, type) and issubclass(below, Section) and isinstance(value, dict):
            _refuse_unknown(cast(dict[str, Any], value), below, where, (*path, key))
        elif (item := _section_of(below)) and isinstance(value, list):
            for number, entry in enumerate(cast(list[Any], value)):
                if isinstance(entry, dict):
                    _refuse_unknown(cast(dict[str, Any], entry), item, where, (*path, f"{key}[{number}]"))


def _refuse_unrecordable(value: Any, where: str, key: str) -> None:
    """Every value of a config is recorded, in recipe.json and in RunStarted: what those can't hold is refused before they are written."""
    if isinstance(value, dict):
        for name, below in cast(dict[str, Any], value).items():
            _refuse_unrecordable(below, where, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for number, below in enumerate(cast(list[Any], value)):
            _refuse_unrecordable(below, where, f"{key}[{number}]")
    elif why := _unrecordable(value):
        raise ConfigError(f"{where}: {key}: {why}")


def _unrecordable(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not finite: give a number"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "the integer does not fit into 64 bits: give a smaller one"
    if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        return "a NUL or half a UTF-16 pair can't be part of a text: take it out"
    return ""


def _section_of(hint: Any) -> type[Section] | None:
    """The section that a list of sections ([[key]] in TOML) is made of."""
    arguments = get_args(hint)
    return arguments[0] if arguments and isinstance(arguments[0], type) and issubclass(arguments[0], Section) else None


def _full(key: str, here: Collection[str], path: tuple[str, ...]) -> str:
    return ".".join((*path, key)) if key in here else key


def _elsewhere(key: str) -> list[str]:
    """A key that exists in another section under the same name."""
    sections = {s: t for s, t in get_type_hints(Config).items() if isinstance(t, type)}
    return [f"{s}.{key}" for s, t in sections.items() if key in get_type_hints(t)][:1]


def _readable(message: str) -> str:
    return message.replace("Object contains", "contains").replace("`$.", "`")


def _check(c: Config, where: str) -> None:
    """Combinations that can't work."""

    def refuse(key: str, why: str) -> None:
        raise ConfigError(f"{where}: {key}: {why}")

    b = c.budgets
    total = b.queue + b.setup + b.agent + b.verify + b.collect + b.margin
    if b.outer and b.outer < total:
        refuse("budgets.outer", f"{b.outer:g} s is less than the phases and margin together ({total:g} s): raise it (S15)")
    if c.sampling.max_new_tokens >= c.sampling.context:
        refuse("sampling.max_new_tokens", f"must be below sampling.context ({c.sampling.context})")
    if c.trainer.loss_reduction == "constant" and not c.trainer.loss_constant:
        refuse("trainer.loss_constant", 'must be above 0 with trainer.loss_reduction = "constant"')
    if c.trainer.loss_reduction != "constant" and c.trainer.loss_constant:
        refuse("trainer.loss_constant", 'has no effect unless trainer.loss_reduction = "constant"')
    if c.policy.experts and c.policy.experts_per_token > c.policy.experts:
        refuse("policy.experts_per_token", f"must not exceed policy.experts ({c.policy.experts})")
    t = c.trainer
    if (t.dp * t.tp * t.cp) % t.ep:
        refuse("trainer.ep", f"must divide dp x tp x cp ({t.dp * t.tp * t.cp}), whose ranks share the experts")
    if c.trainer.routing_replay and not c.engine.routed_experts:
        refuse("trainer.routing_replay", "needs engine.routed_experts = true: there is nothing to replay otherwise (S11)")
    if c.trainer.tis_floor > c.trainer.tis_cap:
        refuse("trainer.tis_floor", f"must not exceed trainer.tis_cap ({c.trainer.tis_cap:g})")
    if c.trainer.max_staleness < (behind := c.push.every - 1 + (c.run.schedule == "one_step")):
        where = f'run.schedule = "{c.run.schedule}" and push.every = {c.push.every}'
        refuse("trainer.max_staleness", f"must be at least {behind} with {where} (S24)")
    if c.sampling.context > c.trainer.microbatch_tokens:
        refuse("trainer.microbatch_tokens", f"must hold one whole conversation (sampling.context = {c.sampling.context})")
    if c.tasks.source == "tiny_shell" and c.tasks.pool < c.tasks.groups_per_step:
        refuse("tasks.pool", f"must be at least tasks.groups_per_step ({c.tasks.groups_per_step})")
    if c.engine.sglang != SGLang() and c.engine.kind != "sglang":
        refuse("engine.sglang", 'has no effect unless engine.kind = "sglang"')
    if c.engine.sglang.tp % c.engine.sglang.ep:
        refuse("engine.sglang.ep", f"must divide engine.sglang.tp ({c.engine.sglang.tp})")
    if taken := [a for a in c.engine.sglang.args if a.split("=")[0] in SGLANG_OWN]:
        refuse("engine.sglang.args", f"{taken[0]} is set by RL360 from other keys of the recipe: leave it out")
    if c.engine.ep > 1 and c.engine.kind != "tiny":
        refuse("engine.ep", "is the tiny engine's: set engine.sglang.ep")
    if c.push.path == "shared_memory" and (c.engine.kind, c.engine.sglang.device) != ("sglang", "cuda"):
        refuse("push.path", '"shared_memory" needs engine.kind = "sglang" on the trainer\'s own GPUs: use "broadcast"')
    if c.push.call_timeout > c.push.timeout:
        refuse("push.call_timeout", f"must not exceed push.timeout ({c.push.timeout:g})")
    if bool(c.agent.command) != (c.agent.harness == "openai_url"):
        refuse("agent.command", 'names the agent of agent.harness = "openai_url": that harness needs it, no other takes it')
    if c.agent.script and c.agent.harness != "scripted":
        refuse("agent.script", 'has no effect unless agent.harness = "scripted"')
    if c.sampling.temperature != 1.0 and c.trainer.old_policy == "sampler" and c.sampling.temperature == 0:
        refuse("sampling.temperature", "0 samples greedily: every attempt of a group is the same and none trains")
    if 0 < c.waves.max_pulls < c.runners.count:
        refuse("waves.max_pulls", f"must be 0 or at least runners.count ({c.runners.count}): each runner has a share of it")
    if why := _too_big_for_a_runner(c):
        refuse(*why)
    if c.engine.min_healthy > c.engine.count:
        refuse("engine.min_healthy", f"must not exceed engine.count ({c.engine.count})")
    if c.sandbox.image and c.sandbox.kind != "docker":
        refuse("sandbox.image", 'has an effect with sandbox.kind = "docker" alone: leave it out')
    for number, fault in enumerate(c.faults):
        if why := _fault_problem(c, fault):
            refuse(f"faults[{number}].{why[0]}", why[1])


def _too_big_for_a_runner(c: Config) -> tuple[str, str] | None:
    """The key of a reservation that the largest sandbox doesn't fit into, and why: it would wait for ever."""
    if 0 < c.runners.memory_mb < c.sandbox.reserved_mb:
        return (
            "runners.memory_mb",
            f"must be 0 or hold one sandbox of {c.sandbox.reserved_mb} MiB (memory, and workdir in memory)",
        )
    if 0 < c.runners.cpus < c.sandbox.cpus:
        return "runners.cpus", f"must be 0 or hold one sandbox: sandbox.cpus is {c.sandbox.cpus:g}"
    return None


def _fault_problem(c: Config, fault: Fault) -> tuple[str, str] | None:
    """The key of a fault that can't strike, and why."""
    if fault.step >= c.run.steps:
        return "step", f"{fault.step} is never reached: run.steps is {c.run.steps}, steps count from 0"
    if fault.of_engines and fault.domain:
        return "domain", "has no effect on engines: take it out"
    if fault.kind == "sandbox_kill" and c.sandbox.kind == "subprocess":
        return "kind", 'sandbox_kill needs sandbox.kind = "bwrap" or "docker": plain processes have no first process that holds the rest'
    if fault.kind == "sandbox_hang" and c.agent.harness == "openai_url":
        return "kind", "sandbox_hang can't be told from the agent's own hang when the agent itself runs in the sandbox (openai_url)"
    return None
