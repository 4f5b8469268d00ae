"""`rl360 push plan RECIPE`: how a recipe's weights would travel, on paper: from the shape of its policy and the size of its engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rl360.config import Config, load
from rl360.engines.plan import EngineSpec, ShardSpec, plan_push
from rl360.engines.plan_cost import Cost, Rates, cost
from rl360.extras import MissingExtra

_MIB = 1 << 20


def push_plan(recipe: Path, overrides: tuple[str, ...], rates: Rates | None, *, as_json: bool) -> int:
    """Print both paths. Raises ConfigError, ModelError (config.json) or MissingExtra."""
    config = load(recipe, overrides)
    shards = _shards(config)
    costs = compare(shards, config, rates)
    print(msgspec.json.encode(costs).decode() if as_json else "\n".join(_text(config, shards, costs)))
    return 0


def compare(shards: Sequence[ShardSpec], config: Config, rates: Rates | None) -> list[Cost]:
    """The direct path (where there are experts) and the broadcast."""
    engine = config.engine
    ep = engine.sglang.ep if engine.kind == "sglang" else engine.ep
    engines = [EngineSpec(generation=f"engine{i}", gpus=_gpus(config), ep=ep) for i in range(engine.count)]
    plans = [plan_push(shards, engines, int(config.push.bucket_mb * _MIB), place_experts=place) for place in (True, False)]
    return [cost(plan, rates) for plan in (plans if plans[0].path == "direct" else plans[1:])]


def _shards(config: Config) -> list[ShardSpec]:
    try:
        from rl360.trainer.paper_shards import paper_shards
        from rl360.trainer.spec import ModelSpec
    except ModuleNotFoundError as e:
        raise MissingExtra("rl360 push plan", e.name or "torch", "trainer") from None
    return list(paper_shards(ModelSpec.read(config.policy.folder), config.trainer, config.engine.dtype))


def _gpus(config: Config) -> int:
    return config.engine.sglang.tp if config.engine.kind == "sglang" else config.engine.ep


def _text(config: Config, shards: Sequence[ShardSpec], costs: Sequence[Cost]) -> list[str]:
    total, rest = sum(s.bytes for s in shards), sum(s.bytes for s in shards if s.expert is None)
    holders = len({s.rank for s in shards if s.expert is not None})
    t = config.trainer
    lines = [
        f"policy    {config.policy.folder}: {_size(total)} in {config.engine.dtype}, of which {_size(rest)} are not experts",
        f"trainer   {t.ranks} ranks (tp {t.tp}, pp {t.pp}, cp {t.cp}, dp {t.dp}, ep {t.ep}), of which {holders} hold experts to send",
        f"engines   {config.engine.count}, {_gpus(config)} GPUs each; buckets of {config.push.bucket_mb:g} MiB",
        "",
        f"{'path':<10} {'calls an engine':>15} {'into an engine':>15} {'into a GPU':>12} {'out of a rank':>14} {'seconds':>9}",
    ]
    for c in costs:
        seconds = "-" if c.seconds is None else f"{c.seconds:.0f}"
        lines.append(
            f"{c.path:<10} {c.calls:>15,} {_size(c.bytes_engine):>15} {_size(c.bytes_gpu):>12} {_size(c.bytes_rank):>14} {seconds:>9}"
        )
    return lines


def _size(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.2f} MB"
