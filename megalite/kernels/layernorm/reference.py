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
    compute = rstd.dtype
    weight = weight.to(compute)  # also stands for the bias, of which only the presence is looked at
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.to(compute), x.to(compute), x.shape[-1:], mean, rstd, weight, weight, [True, True, True]
    )
    return dx.to(x.dtype), dweight, dbias
