"""The session server before the real CPU engine: ids, cache and expert rows agree end to end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl360.bus.events import RoutingDelta, TurnCompleted
from rl360.config import Config, Policy, Sampling
from rl360.config import Engine as EngineSection
from rl360.engines.tiny.engine import Engine, EngineOptions
from rl360.engines.tiny.server import serve
from rl360.sessions import prove, worker
from rl360.sessions.merge import merge_session
from rl360.sessions.messages import Message, Tool, ToolCall
from rl360.sessions.templates import get_template, load_tokenizer
from tests.sessions.conftest import Rig
from tests.sessions.test_server import answer_of
from tests.sessions.tokens import policy_folder

TURNS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


@asynccontextmanager
async def tiny(folder: Path, *, experts: bool = False) -> AsyncIterator[str]:
    engine = Engine(EngineOptions(model=folder, generation="tiny-1", context=512, slots=4, routed_experts=experts))
    engine.start()
    runner, port = await serve(engine, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
        engine.stop()


async def talk(rig: Rig) -> list[Any]:
    """A few turns of whatever the policy says; every reply goes back as it came."""
    await rig.open()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "fix calc.py"}]
    for i in range(TURNS):
        code, body = await rig.chat(messages)
        assert code == 200, body
        if body["choices"][0]["finish_reason"] == "length":
            break
        messages += [answer_of(body), {"role": "user", "content": f"(no output) {i}"}]
    return await rig.events(TurnCompleted)


async def test_every_turn_finds_what_a_perfect_cache_would_hold(make_rig: Callable[..., Any]) -> None:
    policy = Policy()
    async with tiny(policy.folder) as url:
        rig = await make_rig(gateway=url, policy=policy, sampling=Sampling(context=512, max_new_tokens=64))
        turns = await talk(rig)
    assert [t.parent for t in turns] == list(range(len(turns)))
    assert [t.cached_tokens for t in turns[1:]] == [t.best_cached for t in turns[1:]]
    assert all(t.generation == "tiny-1" and t.spans[0].version == 0 for t in turns)
    (m,) = merge_session(turns, [], rig.bus.blobs.unpack, replay=False)
    assert m.sampled == sum(t.output_ids.size // 4 for t in turns)


async def test_s10_expert_rows_cover_the_sample(make_rig: Callable[..., Any], tmp_path: Path) -> None:
    shipped = Policy().folder
    folder = tmp_path / "moe"
    config = Qwen3MoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0])
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((shipped / "tokenizer.json").read_bytes())
    async with tiny(folder, experts=True) as url:
        rig = await make_rig(gateway=url, policy=Policy(path=str(folder)), engine=EngineSection(routed_experts=True))
        turns = await talk(rig)
    deltas = await rig.events(RoutingDelta)
    (m,) = merge_session(turns, deltas, rig.bus.blobs.unpack, replay=True)
    assert m.cut_tokens == 0
    assert m.routing is not None
    assert (m.routing.rows, m.routing.layers, m.routing.topk) == (len(m.sample) - 1, 1, 2)


def test_the_shipped_policy_s_own_template_is_k2v3() -> None:
    tokenizer = load_tokenizer(Policy().folder)
    own, fixed = prove.admit("jinja", tokenizer), get_template("k2v3", tokenizer)
    tools = [
        Tool(name="bash", parameters={"properties": {"command": {}}}),
        Tool(name="edit", parameters={"properties": {"a": {}, "b": {}}}),
    ]
    calls = (ToolCall(name="bash", arguments={"command": "ls <|im_end|> é"}), ToolCall(name="edit", arguments={"a": 1, "b": [None]}))
    messages = [
        Message(role="system", content="s"),
        Message(role="user", content="u"),
        Message(role="assistant", content="text", tool_calls=calls),
        Message(role="tool", content="x"),
        Message(role="tool", content=""),
    ]
    for n in range(1, 6):
        for offered in ([], tools):
            assert own.render(messages[:n], offered) == fixed.render(messages[:n], offered)
    assert own.generation_prompt == fixed.generation_prompt
    assert own.stop_token_ids == fixed.stop_token_ids


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = policy_folder(tmp_path, vocab_size=300)
    with pytest.raises(prove.TemplateError, match=r"\d+ tokens, the model 300"):
        worker.load_template(Config(policy=Policy(path=str(folder))))
