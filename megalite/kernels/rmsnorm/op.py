"""RMSNorm as an autograd function over a pure forward and backward."""

import torch
from torch import Tensor

from megalite.kernels.rmsnorm import reference
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


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float, impl=reference) -> Tensor:
    """RMSNorm of the rows of x (M, D) with weight (D,); leading dims of x are folded into M.

    Memory: keeps x and one number per row for backward.
    Numerics: fp32 inside for bf16 and fp16; the weight's gradient leaves in fp32.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rmsnorm weight of shape {tuple(weight.shape)} does not fit rows of {x.shape[-1]} elements")
    return _RmsNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps, impl).view(x.shape)
