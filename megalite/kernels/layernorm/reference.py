"""LayerNorm forward and backward in plain torch, fp32 inside (fp64 for fp64).

Reference: Ba et al., arXiv:1607.06450.
"""

import torch
from torch import Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dim.

    Args:
        x:            (M, D).
        weight, bias: (D,).

    Returns:
        y (M, D) in x's dtype; mean and rstd (M, 1) in the compute dtype.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    y, mean, rstd = torch.native_layer_norm(x.to(compute), x.shape[-1:], weight.to(compute), bias.to(compute), eps)
    return y.to(x.dtype), mean, rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx (M, D) in x's dtype, dweight and dbias (D,) in the compute dtype."""
    dx, dweight, dbias = _backward(dy, x, weight, mean, rstd)
    return dx.to(x.dtype), dweight, dbias


def forward_residual(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm of the sum x + residual, rounded to x's dtype: y, the sum (M, D), mean and rstd (M, 1)."""
    total = x + residual
    y, mean, rstd = forward(total, weight, bias, eps)
    return y, total, mean, rstd


def backward_residual(
    dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x and of residual, which is one tensor (M, D), from those of y and of the sum; dweight and dbias
    (D,)."""
    dx, dweight, dbias = _backward(dy, total, weight, mean, rstd)
    return dx.add_(dtotal).to(total.dtype), dweight, dbias


def _backward(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    compute = rstd.dtype
    weight = weight.to(compute)  # also stands for the bias, of which only the presence is looked at
    return torch.ops.aten.native_layer_norm_backward(
        dy.to(compute), x.to(compute), x.shape[-1:], mean, rstd, weight, weight, [True, True, True]
    )
