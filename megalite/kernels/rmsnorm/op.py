"""RMSNorm, alone, fused with the residual add before it, and beside what it norms, as autograd functions over pure
ones."""

import torch
from torch import Tensor

from megalite.kernels.rmsnorm import reference
from megalite.kernels.tiles import as_matrix, in_shape
from megalite.kernels.wgrad import accumulate_grad


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, impl):
        y, rstd = impl.forward(x, weight, eps)
        ctx.save_for_backward(x, rstd)
        ctx.weight, ctx.impl = weight, impl
        return y

    @staticmethod
    def backward(ctx, dy):
        x, rstd = ctx.saved_tensors
        dx, dweight = ctx.impl.backward(dy, x, ctx.weight, rstd)
        return dx, accumulate_grad(ctx.weight, dweight), None, None


class _RmsNormBeside(_RmsNorm):
    @staticmethod
    def forward(ctx, x, weight, eps, impl):
        return _RmsNorm.forward(ctx, x, weight, eps, impl), x

    @staticmethod
    def backward(ctx, dy, dskipped):
        x, rstd = ctx.saved_tensors
        dx, dweight = ctx.impl.backward_residual(dy, dskipped, x, ctx.weight, rstd)
        return dx, accumulate_grad(ctx.weight, dweight), None, None


class _RmsNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, impl):
        y, total, rstd = impl.forward_residual(x, residual, weight, eps)
        ctx.save_for_backward(total, rstd)
        ctx.weight, ctx.impl = weight, impl
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal):
        total, rstd = ctx.saved_tensors
        dx, dweight = ctx.impl.backward_residual(dy, dtotal, total, ctx.weight, rstd)
        return dx, dx, accumulate_grad(ctx.weight, dweight), None, None


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float, impl=reference) -> Tensor:
    """RMSNorm of the rows of x (M, D) with weight (D,); leading dims of x are folded into M.

    Memory: keeps x and one number per row for backward.
    Numerics: fp32 inside for bf16 and fp16; the weight's gradient leaves in fp32.
    """
    _check(x, weight)
    return in_shape(_RmsNorm.apply(as_matrix(x), weight, eps, impl), x)


def rmsnorm_beside(x: Tensor, weight: Tensor, *, eps: float, impl=reference) -> tuple[Tensor, Tensor]:
    """RMSNorm of x (..., D), and x itself for whoever else reads it: backward adds both gradients in its one pass."""
    _check(x, weight)
    y, skipped = _RmsNormBeside.apply(as_matrix(x), weight, eps, impl)
    return in_shape(y, x), in_shape(skipped, x)


def rmsnorm_residual(
    x: Tensor, residual: Tensor, *, weight: Tensor, eps: float, impl=reference
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and the sum itself, both in the shape of x (..., D).

    Memory: keeps the sum and one number per row for backward.
    Numerics: the same as the two ops, one after the other.
    """
    _check(x, weight)
    if residual.shape != x.shape:
        raise ValueError(f"rmsnorm residual of shape {tuple(residual.shape)} does not fit x of shape {tuple(x.shape)}")
    y, total = _RmsNormResidual.apply(as_matrix(x), as_matrix(residual), weight, eps, impl)
    return in_shape(y, x), in_shape(total, x)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rmsnorm weight of shape {tuple(weight.shape)} does not fit rows of {x.shape[-1]} elements")
