"""RMSNorm forward and backward in plain torch, fp32 inside (fp64 for fp64).

Reference: Zhang and Sennrich, arXiv:1910.07467.
"""

import torch
from torch import Tensor


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim.

    Args:
        x:      (M, D).
        weight: (D,).

    Returns:
        y (M, D) in x's dtype; rstd (M, 1) in the compute dtype.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = (wide * rstd).mul_(weight)
    return y.to(x.dtype), rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx (M, D) in x's dtype, dweight (D,) in the compute dtype."""
    dx, dweight = _backward(dy, x, weight, rstd)
    return dx.to(x.dtype), dweight


def forward_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of the sum x + residual, rounded to x's dtype: y, the sum (M, D), rstd (M, 1)."""
    total = x + residual
    y, rstd = forward(total, weight, eps)
    return y, total, rstd


def backward_residual(dy: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x and of residual, which is one tensor (M, D), from those of y and of the sum; dweight (D,)."""
    dx, dweight = _backward(dy, total, weight, rstd)
    return dx.add_(dtotal).to(total.dtype), dweight


def _backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    normed = x.to(rstd.dtype) * rstd
    wide = dy.to(rstd.dtype)
    scaled = wide * normed
    dweight = scaled.sum(0)
    mean = torch.mv(scaled, weight.to(rstd.dtype)).div_(x.shape[-1])
    return (wide * weight).addcmul_(normed, mean[:, None], value=-1.0).mul_(rstd), dweight
