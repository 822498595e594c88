"""Rotary embedding as autograd functions; they keep only the tables, which all blocks share.

An implementation is a module with `forward` and `backward` as in reference.py and, where it can join three gradients as
it turns them back, `backward_heads(grads, cos, sin)`.
"""

from collections.abc import Sequence

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
    check_angles(qkv, cos, sin)
    return _Rope.apply(qkv, cos, sin, num_rotated, impl)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, angles, heads, impl):
        ctx.angles, ctx.impl = angles, impl
        packed = qkv if angles is None else impl.forward(qkv, *angles, sum(heads[:2]))
        return tuple(part.transpose(1, 2) for part in packed.split(heads, dim=2))

    @staticmethod
    def backward(ctx, *grads):
        grads = [grad.transpose(1, 2) for grad in grads]
        if ctx.angles is None:
            return torch.cat(grads, dim=2), None, None, None
        join = getattr(ctx.impl, "backward_heads", None)
        if join is not None:
            return join(grads, *ctx.angles), None, None, None
        num_rotated = grads[0].shape[2] + grads[1].shape[2]
        return ctx.impl.backward(torch.cat(grads, dim=2), *ctx.angles, num_rotated), None, None, None


def split_heads(
    qkv: Tensor, *, heads: Sequence[int], angles: tuple[Tensor, Tensor] | None = None, impl=reference
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a packed tensor, q and k rotated if there are angles; their three gradients become one tensor.

    Args:
        qkv:    (B, S, heads, H).
        heads:  how many are q, k and v.
        angles: cos and sin, (S, H/2) each.

    Returns:
        (B, its heads, S, H) each: views of one tensor, which without angles is qkv itself.

    Memory: backward writes the gradient of qkv once, where slicing would fill and add three tensors of its size.
    """
    check_heads(heads, qkv)
    if angles is not None:
        check_angles(qkv, *angles)
    return _SplitHeads.apply(qkv, angles, tuple(heads), impl)


def check_heads(heads: Sequence[int], qkv: Tensor) -> Sequence[int]:
    """heads, if they are q, k and v of qkv (B, S, heads, H); else a ValueError."""
    if len(heads) != 3 or sum(heads) != qkv.shape[2]:
        raise ValueError(f"heads={tuple(heads)} are not q, k and v of qkv (B, S, heads, H) of shape {tuple(qkv.shape)}")
    return heads


def check_angles(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuse tables that do not fit, with a ValueError."""
    if cos.shape != (qkv.shape[1], qkv.shape[3] // 2) or cos.shape != sin.shape:
        shapes = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ValueError(f"rope tables of shapes {shapes} do not fit qkv (B, S, heads, H) of shape {tuple(qkv.shape)}")
