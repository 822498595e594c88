"""How far two layouts may differ by rounding alone.

[Note: the bound] Both runs evaluate the same function in another order. A sum of n terms has a relative error of about
sqrt(n) u (Higham and Mary, 2019, doi:10.1137/18M1226312), u the unit roundoff; `depth` operations in a row add their
errors; two runs differ by at most twice that: b = 2 u sqrt(n) depth, with n the longest sum (width, ffn, vocabulary, or
the rows of a global batch) and ROUNDINGS per block, forward and backward. Gradients that are reduced in a narrower
dtype are rounded there once per summand more. A tensor far below its share of the global norm is compared on the scale
of that share, since it may be a difference of larger numbers (k's bias is zero but for roundings).

[Note: growth] Later steps start from weights that differ already. AdamW's update m / (sqrt(v) + eps) changes by at
most 1 / eps times the change of the clipped gradients (m and v are averages of them, |m| <= sqrt(v)), SGD's by 1 / (1 -
momentum). Clipping multiplies changes by its factor or less. The next loss changes by the norm of its gradient, and the
next gradient by the curvature, times the change of the weights; the curvature is measured on the reference itself, as
the largest ratio of the change of gradient to the change of weights between its steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.model.context import DTYPES
from megalite.optim.norm import clip_factor
from megalite.verify.run import Record, Tensors

ROUNDINGS = 12
"""Of a block in a row: norm, qkv, rope, scores, softmax, mix, out, add, norm, up, activation, down and its add."""


@dataclass(frozen=True)
class Bounds:
    """Allowed 2-norm of differences. `relative` is b of [Note: the bound]."""

    relative: float
    steps: tuple[tuple[float, float], ...]
    """(gradients, weights) of each step, absolute: what its gradients may differ by beyond `relative`, and what its
    weights may after the update."""


def relative_bound(config: Config) -> float:
    """b for a layout."""
    model, batch = config.model, config.batch
    heads = model.num_heads * model.head_dim
    rows = batch.global_batch_size * batch.seq_len
    longest = max(model.hidden_size, model.ffn_size, heads, config.padded_vocab, rows)
    depth = 2 * (ROUNDINGS * model.num_layers + 6)
    b = 2 * unit_roundoff(DTYPES[config.precision.compute]) * longest**0.5 * depth
    if config.precision.reduce == "bf16" and config.dp > 1:
        num = config.dp * (batch.num_microbatches if config.zero.reduce_each == "microbatch" else 1)
        b += 2 * unit_roundoff(torch.bfloat16) * num
    return b


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def bounds(config: Config, reference: Record) -> Bounds:
    """All bounds of a comparison with `reference`; see [Note: growth]."""
    b, optimizer = relative_bound(config), config.optimizer
    gain = config.lr.peak * (1 / optimizer.eps if optimizer.name == "adamw" else 1 / (1 - optimizer.momentum))
    u = unit_roundoff(DTYPES[config.precision.compute])
    curvature = _curvature(reference)
    grads, weights, steps = 0.0, 0.0, []
    for step in reference.steps:
        grads = curvature * weights
        # the last term is what weights are rounded to: once after the decay, once after the update
        clip = clip_factor(step.scalars["grad_norm"], optimizer.clip_norm)
        weights += gain * clip * (b * norm(step.grads) + grads) + 2 * u * norm(step.weights)
        steps.append((grads, weights))
    return Bounds(b, tuple(steps))


def _curvature(reference: Record) -> float:
    pairs = zip(reference.steps, reference.steps[1:], strict=False)
    ratios = [distance(b.grads, a.grads) / max(distance(b.weights, a.weights), 1e-30) for a, b in pairs]
    return max(ratios, default=0.0)


def norm(tensors: Tensors) -> float:
    """2-norm of all elements."""
    return float(sum(square_sum(t) for t in tensors.values()) ** 0.5)


def distance(a: Tensors, b: Tensors) -> float:
    """2-norm of the difference."""
    return norm({name: a[name] - value for name, value in b.items()})


def square_sum(tensor: Tensor) -> float:
    """Of the elements, in fp64."""
    return float(tensor.double().square().sum())
