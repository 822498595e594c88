"""Rotary embedding as an autograd function; keeps only the tables, which all blocks share."""

import torch
from torch import Tensor

from megalite.kernels.rope import reference


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, num_rotated, impl):
        ctx.cos, ctx.sin, ctx.num_rotated, ctx.impl = cos, sin, num_rotated, impl
        return impl.forward(qkv, cos, sin, num_rotated)

    @staticmethod
    def backward(ctx, dqkv):
        return ctx.impl.backward(dqkv, ctx.cos, ctx.sin, ctx.num_rotated), None, None, None, None


def rope(qkv: Tensor, cos: Tensor, sin: Tensor, *, num_rotated: int, impl=reference) -> Tensor:
    """Rotate the first `num_rotated` heads of qkv (B, S, heads, H) by the angles of cos, sin (S, H/2).

    Numerics: computed in the tables' dtype (fp32, or fp64 for fp64), rounded once to qkv's.
    """
    if cos.shape != (qkv.shape[1], qkv.shape[3] // 2) or cos.shape != sin.shape:
        shapes = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ValueError(f"rope tables of shapes {shapes} do not fit qkv (B, S, heads, H) of shape {tuple(qkv.shape)}")
    return _Rope.apply(qkv, cos, sin, num_rotated, impl)
