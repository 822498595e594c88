"""Dropout with a counter-based mask: independent of tp, sequence parallel, pp, dp, microbatches and recompute."""

import torch
from torch import Tensor

from megalite.kernels.dropout import reference
from megalite.kernels.philox import Key


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, key, starts, impl):
        ctx.mask, ctx.impl = {"p": p, "key": key, "starts": starts}, impl
        return impl.forward(x, **ctx.mask)

    @staticmethod
    def backward(ctx, dy):
        return ctx.impl.backward(dy, **ctx.mask), None, None, None, None


def dropout(x: Tensor, p: float, *, key: Key, starts: tuple[int, ...], impl=reference) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p); `x` itself when p is 0.

    Args:
        x:      any shape; dim 0 is divisible by len(starts).
        key:    the stream, from (seed, op name with layer index, step).
        starts: global index of the first element of each of len(starts) equal runs along dim 0 of x.

    Memory: keeps nothing for backward.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout p={p} must be in [0, 1); use 0 to switch it off")
    return _Dropout.apply(x, p, key, starts, impl) if p > 0.0 else x
