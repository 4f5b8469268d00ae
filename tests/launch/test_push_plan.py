"""`rl360 push plan`: the calls and bytes of a recipe's push, on paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl360.cli import main
from rl360.config import Trainer
from rl360.engines.plan import EngineSpec, plan_push
from rl360.engines.plan_cost import Rates, cost
from rl360.engines.weights import shard_specs
from rl360.tiny import policy_folder
from rl360.tiny.upcycle import Recipe, upcycle
from rl360.trainer.hf import HFWeights
from rl360.trainer.paper_shards import paper_shards
from rl360.trainer.spec import ModelError, ModelSpec

ROOT = Path(__file__).parents[2]


def test_the_375b_shape_takes_41_calls_an_engine_direct_and_1432_by_broadcast(capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["push", "plan", "recipes/moe-375b.toml", "--broadcast-rate", "1.38", "--direct-rate", "5", "--json"]) == 0
    direct, broadcast = json.loads(capsys.readouterr().out)
    assert (direct["path"], direct["calls"], broadcast["path"], broadcast["calls"]) == ("direct", 41, "broadcast", 1432)
    assert round(broadcast["bytes_gpu"] / 1e9) == 756, "every weight goes to every GPU"
    assert broadcast["seconds"] > 10 * direct["seconds"] > 100
    assert main(["push", "plan", "recipes/moe-375b.toml"]) == 0
    out = capsys.readouterr().out
    assert "755.6 GB in bfloat16, of which 20.0 GB are not experts" in out and "of which 256 hold experts" in out


@pytest.mark.parametrize("experts", [0, 8])
def test_the_weights_on_paper_are_those_of_the_policy(tmp_path: Path, experts: int) -> None:
    folder = policy_folder()
    if experts:
        upcycle(policy_folder(), tmp_path, Recipe(experts=experts, topk=2), seed=0)
        folder = tmp_path
    paper = list(paper_shards(ModelSpec.read(folder), Trainer(), "float32"))
    real = shard_specs(HFWeights(folder))
    assert sorted(paper, key=lambda s: s.name) == sorted(real, key=lambda s: s.name)


def test_each_expert_is_on_one_rank_of_its_stage(tmp_path: Path) -> None:
    upcycle(policy_folder(), tmp_path, Recipe(experts=8, topk=2), seed=0)
    spec = ModelSpec.read(tmp_path)
    ranks = {s.name: s.rank for s in paper_shards(spec, Trainer(dp=4, pp=3, ep=4), "float32")}
    assert [ranks[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] for e in range(8)] == [4, 4, 5, 5, 6, 6, 7, 7]
    assert ranks["model.layers.2.mlp.experts.0.down_proj.weight"] == 8 and ranks["model.norm.weight"] == 0
    with pytest.raises(ModelError, match="ep = 3 doesn't divide 8 experts"):
        list(paper_shards(spec, Trainer(dp=3, ep=3), "float32"))


def test_the_busiest_link_decides_how_long_experts_take(tmp_path: Path) -> None:
    upcycle(policy_folder(), tmp_path, Recipe(experts=8, topk=2), seed=0)
    shards = list(paper_shards(ModelSpec.read(tmp_path), Trainer(dp=4, ep=4), "float32"))
    experts = sum(s.bytes for s in shards if s.expert is not None)
    rest = sum(s.bytes for s in shards) - experts
    rates = Rates(broadcast=1e6, direct=1e5, call=0.5)
    for engines, busiest in ((1, experts / 2), (4, experts)):  # into one of an engine's two GPUs; out of one of four ranks, to four engines
        specs = [EngineSpec(generation=f"e{i}", gpus=2, ep=2) for i in range(engines)]
        found = cost(plan_push(shards, specs, 1 << 30, place_experts=True), rates)
        assert found.calls == 2 and found.bytes_gpu == rest + experts / 2
        assert found.seconds == pytest.approx(rest / 1e6 + busiest / 1e5 + 2 * 0.5)
