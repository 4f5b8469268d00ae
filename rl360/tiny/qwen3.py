"""A Qwen3 language model in plain torch, for the warm start alone. Parameters have their Hugging Face names.

Not covered: a KV cache, rope scaling, attention bias, experts. The engine and the trainer have their own forwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Shape:
    """0.23M parameters, 0.9 MB in float32."""

    vocabulary: int = 640
    hidden: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    feed_forward: int = 192
    context: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    init_std: float = 0.04
    embedding_std: float = 0.1


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = nn.RMSNorm(s.head_dim, s.norm_eps)
        self.k_norm = nn.RMSNorm(s.head_dim, s.norm_eps)

    def forward(self, x_bth: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
        b, t, _ = x_bth.shape
        q = self.q_norm(self.q_proj(x_bth).view(b, t, -1, self.shape.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_bth).view(b, t, -1, self.shape.head_dim)).transpose(1, 2)
        v = self.v_proj(x_bth).view(b, t, -1, self.shape.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos_td, sin_td), _rotate(k, cos_td, sin_td)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.feed_forward, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.feed_forward, bias=False)
        self.down_proj = nn.Linear(s.feed_forward, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(s.hidden, s.norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden, s.norm_eps)
        self.mlp = FeedForward(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, s.norm_eps)


class Qwen3(nn.Module):
    """ids [b, t] int64 -> logits [b, t, vocabulary] float32; positions start at 0 in every row."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.cos, self.sin = _rope(shape)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                embedding = parameter is self.model.embed_tokens.weight
                nn.init.normal_(parameter, std=shape.embedding_std if embedding else shape.init_std, generator=generator)

    def forward(self, ids_bt: Tensor) -> Tensor:
        return self.logits(self.hidden(ids_bt))

    def hidden(self, ids_bt: Tensor) -> Tensor:
        """What the last layer gives out, [b, t, hidden]."""
        t = ids_bt.shape[1]
        x = self.model.embed_tokens(ids_bt)
        for layer in self.model.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> logits [..., vocabulary]."""
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight)


def _rope(s: Shape) -> tuple[Tensor, Tensor]:
    frequency = 1.0 / (s.rope_theta ** (torch.arange(0, s.head_dim, 2).float() / s.head_dim))
    angle = torch.outer(torch.arange(s.context).float(), frequency)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def _rotate(x_bhtd: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
    first, second = x_bhtd.chunk(2, -1)
    return x_bhtd * cos_td + torch.cat([-second, first], -1) * sin_td


def hf_config(shape: Shape, eos: int, pad: int) -> dict[str, object]:
    """config.json of a Qwen3ForCausalLM of this shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.feed_forward,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": shape.init_std,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
