"""Rotary embedding on the CPU in C++ (csrc/rope_cpu.cpp), with the signatures of reference.py and `backward_heads`.

Numerics: fp32 inside, rounded once; every vector level and number of threads gives the same bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalite import native
from megalite.kernels.native_calls import as_table, how, problem
from megalite.kernels.tiles import contiguous_columns

__all__ = ["backward", "backward_heads", "forward", "problem"]


def forward(qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:
    """Rotate the first `num_rotated` heads of (B, S, heads, H); a new tensor."""
    return _rotate([qkv[:, :, :num_rotated]], [qkv[:, :, num_rotated:]], cos, sin, sign=1.0)


def backward(dqkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:
    """The inverse rotation of the gradient."""
    return _rotate([dqkv[:, :, :num_rotated]], [dqkv[:, :, num_rotated:]], cos, sin, sign=-1.0)


def backward_heads(grads: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """`backward` of dq, dk and dv, each (B, S, its heads, H) of any strides, joined in the same pass."""
    return _rotate(grads[:2], grads[2:], cos, sin, sign=-1.0)


def _rotate(turned: Sequence[Tensor], passed: Sequence[Tensor], cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    """The heads of all tensors in their order, those of `turned` rotated, in one new tensor."""
    heads = [contiguous_columns(t) for t in (*turned, *passed)]
    num_samples, seq_len, _, head_dim = heads[0].shape
    out = torch.empty(num_samples, seq_len, sum(t.shape[2] for t in heads), head_dim, dtype=heads[0].dtype)
    if out.numel() == 0:
        return out
    cos, sin = as_table(cos), as_table(sin)
    runs = [(t.data_ptr(), t.shape[2], *t.stride()[:3], i < len(turned)) for i, t in enumerate(heads)]
    sizes = (num_samples * seq_len, seq_len, head_dim // 2)
    native.load().rope(
        np.array(runs, np.int64), out.data_ptr(), cos.data_ptr(), sin.data_ptr(), sizes, sign, **how(*heads)
    )
    return out
