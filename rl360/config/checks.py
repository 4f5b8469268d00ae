"""Combinations of keys that can't work, refused before anything starts."""

from __future__ import annotations

from typing import Final

from rl360.config.sections import Config, ConfigError, Fault, HarborAgent, SGLang

# fmt: off
SGLANG_OWN: Final = frozenset({
    "--model", "--model-path", "--served-model-name", "--host", "--port", "--device", "--dtype", "--context-length", "--random-seed",
    "--max-running-requests", "--tp", "--tp-size", "--tensor-parallel-size", "--ep", "--ep-size", "--expert-parallel-size",
    "--dp-size", "--pp-size", "--base-gpu-id", "--mem-fraction-static", "--weight-version", "--enable-return-routed-experts",
})
# fmt: on
"""Arguments of SGLang's server that RL360 sets, or under which it can't push weights."""


def check(c: Config, where: str) -> None:
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
    if c.agent.harbor != HarborAgent() and c.agent.harness != "harbor":
        refuse("agent.harbor", 'has no effect unless agent.harness = "harbor"')
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
    if fault.kind == "sandbox_hang" and c.agent.harness in ("openai_url", "harbor"):
        return "kind", "sandbox_hang can't be told from the agent's own hang by agent.harness = openai_url or harbor"
    return None
