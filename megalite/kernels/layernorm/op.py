"""LayerNorm, alone, fused with the residual add before it, and beside what it norms, as autograd functions over pure
ones."""

import torch
from torch import Tensor

from megalite.kernels.layernorm import reference
from megalite.kernels.tiles import as_matrix, in_shape
from megalite.kernels.wgrad import accumulate_grad


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, impl):
        y, mean, rstd = impl.forward(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.impl = weight, bias, impl
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = ctx.impl.backward(dy, x, ctx.weight, mean, rstd)
        return dx, accumulate_grad(ctx.weight, dweight), accumulate_grad(ctx.bias, dbias), None, None


class _LayerNormBeside(_LayerNorm):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, impl):
        return _LayerNorm.forward(ctx, x, weight, bias, eps, impl), x

    @staticmethod
    def backward(ctx, dy, dskipped):
        x, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = ctx.impl.backward_residual(dy, dskipped, x, ctx.weight, mean, rstd)
        return dx, accumulate_grad(ctx.weight, dweight), accumulate_grad(ctx.bias, dbias), None, None


class _LayerNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, impl):
        y, total, mean, rstd = impl.forward_residual(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, mean, rstd)
        ctx.weight, ctx.bias, ctx.impl = weight, bias, impl
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal):
        total, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = ctx.impl.backward_residual(dy, dtotal, total, ctx.weight, mean, rstd)
        return dx, dx, accumulate_grad(ctx.weight, dweight), accumulate_grad(ctx.bias, dbias), None, None


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, impl=reference) -> Tensor:
    """LayerNorm of the rows of x (M, D) with weight and bias (D,); leading dims of x are folded into M.

    Memory: keeps x and two numbers per row for backward.
    Numerics: fp32 inside for bf16 and fp16; the parameters' gradients leave in fp32.
    """
    _check(x, weight, bias)
    return in_shape(_LayerNorm.apply(as_matrix(x), weight, bias, eps, impl), x)


def layernorm_beside(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, impl=reference) -> tuple[Tensor, Tensor]:
    """LayerNorm of x (..., D), and x itself for whoever else reads it: backward adds the two gradients in its one
    pass."""
    _check(x, weight, bias)
    y, skipped = _LayerNormBeside.apply(as_matrix(x), weight, bias, eps, impl)
    return in_shape(y, x), in_shape(skipped, x)


def layernorm_residual(
    x: Tensor, residual: Tensor, *, weight: Tensor, bias: Tensor, eps: float, impl=reference
) -> tuple[Tensor, Tensor]:
    """LayerNorm of x + residual, and the sum itself, both in the shape of x (..., D).

    Memory: keeps the sum and two numbers per row for backward.
    Numerics: the same as the two ops, one after the other.
    """
    _check(x, weight, bias)
    if residual.shape != x.shape:
        shapes = f"{tuple(residual.shape)} does not fit x of shape {tuple(x.shape)}"
        raise ValueError(f"layernorm residual of shape {shapes}")
    y, total = _LayerNormResidual.apply(as_matrix(x), as_matrix(residual), weight, bias, eps, impl)
    return in_shape(y, x), in_shape(total, x)


def _check(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    if not weight.shape == bias.shape == x.shape[-1:]:
        shapes = f"{tuple(weight.shape)} and {tuple(bias.shape)}"
        raise ValueError(f"layernorm weight and bias of shapes {shapes} do not fit rows of {x.shape[-1]} elements")
