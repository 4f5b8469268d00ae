"""How many floating-point operations a training pass needs, counted from shapes. Pure.

A product of [a, b] with [b, c] counts 2abc. The backward counts twice the forward; what is computed again to save memory is not counted,
nor are norms, rotations, activations and the embedding's look-up. Attention counts what a causal token sees: half of the square.
"""

from __future__ import annotations

from collections.abc import Iterable

from rl360.trainer.spec import ModelSpec

BACKWARD = 2
"""Times the forward: gradients of the inputs and of the weights."""


def forward_flops(spec: ModelSpec, lengths: Iterable[int], rows: int) -> float:
    """Of one microbatch: sequences of these lengths, logits for `rows` of their tokens.

    >>> spec = ModelSpec(vocab=10, hidden=4, layers=1, heads=2, groups=1, head_dim=2, ffn_hidden=6, norm_eps=0, rope_theta=1, context=9,
    ...     tied=True)
    >>> forward_flops(spec, [3], 1)  # 2 * 3 * (4 * 8 + 4 * 4 + 3 * 4 * 6) + 4 * (9 / 2) * 4 + 2 * 4 * 10
    872.0
    """
    lengths = list(lengths)
    squares = sum(n * n for n in lengths) / 2
    attended = spec.layers * 2 * 2 * squares * spec.heads * spec.head_dim
    return 2.0 * sum(lengths) * _weights(spec) + attended + 2.0 * rows * spec.hidden * spec.vocab


def step_flops(spec: ModelSpec, lengths: Iterable[int], rows: int) -> float:
    """Of forward and backward."""
    return (1 + BACKWARD) * forward_flops(spec, lengths, rows)


def _weights(spec: ModelSpec) -> float:
    """Weights that each token is multiplied with, the output layer aside."""
    width = spec.heads * spec.head_dim
    attention = spec.hidden * (width + 2 * spec.groups * spec.head_dim) + width * spec.hidden
    dense = 3 * spec.hidden * spec.ffn_hidden
    experts = spec.experts
    if experts is None:
        return spec.layers * (attention + dense)
    sparse = 3 * spec.hidden * experts.ffn_hidden * experts.topk + spec.hidden * experts.count
    return spec.layers * attention + sum(sparse if has else dense for has in experts.layers)
