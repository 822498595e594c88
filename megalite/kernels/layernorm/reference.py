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
    wide = dy.to(rstd.dtype)
    normed = (x.to(rstd.dtype) - mean).mul_(rstd)
    dweight, dbias = (wide * normed).sum(0), wide.sum(0)
    dnormed = wide * weight
    projection = (dnormed * normed).mean(-1, keepdim=True)
    dx = dnormed.sub_(dnormed.mean(-1, keepdim=True)).addcmul_(normed, projection, value=-1.0).mul_(rstd)
    return dx.to(x.dtype), dweight, dbias
