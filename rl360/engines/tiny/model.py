"""The forward of Qwen3 and Qwen3-MoE over a slot KV cache: one flat row of activations a token, attention by sequence.

Suffixes: n tokens, d hidden, h heads, g KV heads, k head size, t cached positions, v vocabulary, e experts.
Not covered: tensor parallelism, quantisation, rope scaling.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rl360.engines.tiny.weights import Layer, Weights


class Piece(NamedTuple):
    """New tokens of one sequence: `ids` take positions start, start + 1, ... of `slot`, whose rows before are cached."""

    slot: int
    start: int
    ids: Sequence[int]


class Attend(Protocol):
    """Attention of new tokens over their own slots, their own keys and values being written already."""

    def __call__(self, layer: int, q_nhk: Tensor) -> Tensor: ...  # -> [n, h * k]


class Model:
    """A model with the KV of `slots` sequences of up to `context` tokens. One thread uses it."""

    def __init__(self, weights: Weights, *, slots: int, context: int, capture_experts: bool = False) -> None:
        s = weights.shape
        self.weights, self.slots, self.context = weights, slots, context
        size = (s.layers, slots, s.kv_heads, context, s.head_dim)
        self.keys = list(torch.zeros(size, dtype=weights.dtype))  # by layer [slots, g, context, k]
        self.values = list(torch.zeros(size, dtype=weights.dtype))
        self._key_rows = [k.view(-1, s.head_dim) for k in self.keys]
        self._value_rows = [v.view(-1, s.head_dim) for v in self.values]
        self.experts: Tensor | None = None
        """Experts chosen for a KV row [slots, context, MoE layers, top-k] int16, kept beside it."""
        if capture_experts and s.moe_layers:
            self.experts = torch.zeros(slots, context, len(s.moe_layers), s.topk, dtype=torch.int16)
        self._cos, self._sin = _rotation(context, s.head_dim, s.rope_theta, weights.dtype)
        self._eps = torch.tensor(s.norm_eps)
        self._group = s.heads // s.kv_heads

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Run new tokens of several sequences at once. Returns fp32 logits [pieces, v] after each one's last token."""
        lengths = [len(p.ids) for p in pieces]
        assert all(n and p.start + n <= self.context for p, n in zip(pieces, lengths, strict=True)), "a piece is empty or too long"
        assert len({p.slot for p in pieces}) == len(pieces), "two pieces share a slot"
        ids = torch.tensor([i for p in pieces for i in p.ids])
        positions = torch.cat([torch.arange(p.start, p.start + n) for p, n in zip(pieces, lengths, strict=True)])
        slots = torch.repeat_interleave(torch.tensor([p.slot for p in pieces]), torch.tensor(lengths))
        x_nd = self._forward(ids, slots, positions, _PrefillAttention(self, pieces, lengths))
        return self._logits(x_nd[torch.tensor(lengths).cumsum(0) - 1])

    @torch.inference_mode()
    def decode(self, ids: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Run one token a sequence; `slots` [n] strictly increase (see `check_order`). Returns fp32 logits [n, v]."""
        return self._logits(self._forward(ids, slots, positions, _DecodeAttention(self, slots, positions)))

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` KV rows of a slot to another, experts included."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :rows] = cache[source, :, :rows]
        if self.experts is not None:
            self.experts[target, :rows] = self.experts[source, :rows]

    def _forward(self, ids: Tensor, slots: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        s, weights = self.weights.shape, self.weights
        rotated = s.heads + s.kv_heads
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        heads = torch.arange(s.kv_heads)
        rows = ((slots.unsqueeze(1) * s.kv_heads + heads) * self.context + positions.unsqueeze(1)).view(-1)  # of [slot, g, t]
        x_nd = weights.embed.index_select(0, ids)
        for i, layer in enumerate(weights.layers):
            qkv = F.linear(self._norm(x_nd, layer.attn_norm), layer.qkv).view(-1, rotated + s.kv_heads, s.head_dim)
            qk, v = qkv.split((rotated, s.kv_heads), 1)
            qk = self._norm(qk, layer.qk_norm)
            q, k = torch.addcmul(qk * cos, qk.roll(s.head_dim // 2, -1), sin).split((s.heads, s.kv_heads), 1)
            self._key_rows[i].index_copy_(0, rows, k.reshape(-1, s.head_dim))
            self._value_rows[i].index_copy_(0, rows, v.reshape(-1, s.head_dim))
            x_nd = torch.addmm(x_nd, attend(i, q), layer.out.t())
            x_nd = self._mlp(x_nd, self._norm(x_nd, layer.mlp_norm), layer, i, slots, positions)
        return x_nd

    def _mlp(self, x_nd: Tensor, h_nd: Tensor, layer: Layer, index: int, slots: Tensor, positions: Tensor) -> Tensor:
        if layer.router is not None:
            chosen, share = self._route(h_nd, layer.router)
            if self.experts is not None:
                self.experts[slots, positions, self.weights.shape.moe_layers.index(index)] = chosen.to(torch.int16)
            return _experts(x_nd, h_nd, layer, torch.zeros_like(share).scatter_(1, chosen, share.gather(1, chosen)))
        gate, up = F.linear(h_nd, layer.gate_up).chunk(2, -1)
        return torch.addmm(x_nd, F.silu(gate) * up, layer.down.t())

    def _route(self, h_nd: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts [n, top-k] and every expert's share [n, e], normalised over the chosen ones when the model says so."""
        s = self.weights.shape
        share = torch.softmax(F.linear(h_nd, router), -1, dtype=torch.float32)
        top, chosen = share.topk(s.topk, -1)
        return chosen, (share / top.sum(-1, keepdim=True) if s.norm_topk else share).to(self.weights.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, in fp32. Three times as fast at these sizes as torch's, which is a composite on CPU."""
        x32 = x.float()
        length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x32 * scale).to(x.dtype).mul_(weight)

    def _logits(self, x_nd: Tensor) -> Tensor:
        return F.linear(self._norm(x_nd, self.weights.norm), self.weights.head).float()


def check_order(slots: Tensor) -> None:
    """Decode reads slots as a range: a batch out of order would mix sequences up, so it is refused outright."""
    assert bool((slots[1:] > slots[:-1]).all()), f"slots of a decode batch must strictly increase: {slots.tolist()}"


class _PrefillAttention:
    """Each sequence by itself: its own length, no padding. The queries of a KV head's group are folded into one block."""

    def __init__(self, model: Model, pieces: Sequence[Piece], lengths: Sequence[int]) -> None:
        self._model, self._group = model, model.weights.shape.heads // model.weights.shape.kv_heads
        self._lengths = list(lengths)
        self._spans = [(p.slot, p.start + n, self._mask(p.start, n)) for p, n in zip(pieces, lengths, strict=True)]

    def _mask(self, start: int, n: int) -> Tensor:
        """[group * n, start + n] bool: a token sees the rows up to its own."""
        seen = torch.arange(start + n) <= torch.arange(start, start + n).unsqueeze(1)
        return seen.repeat(self._group, 1)

    def __call__(self, layer: int, q_nhk: Tensor) -> Tensor:
        keys, values, group = self._model.keys[layer], self._model.values[layer], self._group
        out: list[Tensor] = []
        for q, (slot, end, mask) in zip(q_nhk.split(self._lengths), self._spans, strict=True):
            n, _, k = q.shape
            folded = q.view(n, -1, group, k).permute(1, 2, 0, 3).reshape(1, -1, group * n, k)
            o = F.scaled_dot_product_attention(folded, keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end], attn_mask=mask)
            out.append(o.view(-1, group, n, k).permute(2, 0, 1, 3).reshape(n, -1))
        return torch.cat(out)


class _DecodeAttention:
    """All sequences at once, padded to the longest. Reads the cache in place when the batch fills its range of slots well.

    Attention is bound by memory here, and so is copying rows out: up to one idle row for two live ones is cheaper attended
    to and thrown away; the rows of a thinner batch are gathered.
    """

    def __init__(self, model: Model, slots: Tensor, positions: Tensor) -> None:
        self._model = model
        self._group = model.weights.shape.heads // model.weights.shape.kv_heads
        low, high = int(slots[0]), int(slots[-1]) + 1
        self._end = min(model.context, -(-(int(positions.max()) + 1) // 16) * 16)
        self._range = (low, high) if 2 * (high - low) <= 3 * len(slots) else None
        self._rows = None if self._range is None or high - low == len(slots) else slots - low
        self._slots = slots
        last = positions
        if self._rows is not None:
            last = torch.zeros(high - low, dtype=positions.dtype).index_copy_(0, self._rows, positions)
        hidden = torch.arange(self._end) > last.unsqueeze(1)
        self._mask = torch.zeros(hidden.shape, dtype=model.weights.dtype).masked_fill_(hidden, float("-inf"))[:, None, None]

    def __call__(self, layer: int, q_nhk: Tensor) -> Tensor:
        n, h, k = q_nhk.shape
        q = q_nhk.reshape(n, h // self._group, self._group, k)
        keys, values = self._read(self._model.keys[layer]), self._read(self._model.values[layer])
        if self._rows is not None:
            q = q.new_zeros((len(self._mask), *q.shape[1:])).index_copy_(0, self._rows, q)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask)
        return (out if self._rows is None else out[self._rows]).reshape(n, h * k)

    def _read(self, cache: Tensor) -> Tensor:
        """[sequences, g, t, k]: a view of the range, or the rows of the batch's slots copied out."""
        if self._range is None:
            return cache[:, :, : self._end].index_select(0, self._slots)
        return cache[self._range[0] : self._range[1], :, : self._end]


def _experts(x_nd: Tensor, h_nd: Tensor, layer: Layer, share_ne: Tensor) -> Tensor:
    """Residual plus all experts, those not chosen weighted 0: at a few small experts faster on a CPU than picking them out."""
    experts, _, width, hidden = layer.gate_up.shape
    gate, up = F.linear(h_nd, layer.gate_up.view(-1, hidden)).view(-1, experts, 2, width).unbind(2)
    active = F.silu(gate) * up * share_ne.unsqueeze(-1)
    return torch.addmm(x_nd, active.view(-1, experts * width), layer.down.view(hidden, -1).t())


def _rotation(context: int, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin [context, 1, head_dim]: x * cos + roll(x, head_dim / 2) * sin rotates."""
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(context).float(), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).unsqueeze(1).to(dtype), torch.cat([-sin, sin], -1).unsqueeze(1).to(dtype)
